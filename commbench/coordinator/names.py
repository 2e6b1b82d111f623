"""Names of groups, by which custom ops find their coordinator."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

from commbench.errors import CollectiveError

if TYPE_CHECKING:
    from commbench.coordinator.group import GroupCoordinator

_counters: Counter[str] = Counter()
_groups: weakref.WeakValueDictionary[str, GroupCoordinator] = weakref.WeakValueDictionary()


def unique_name(name: str) -> str:
    """``tp`` → ``tp:0``, then ``tp:1`` …; the same on every rank that makes its groups in the same order."""
    number = _counters[name]
    _counters[name] += 1
    return f"{name}:{number}"


def register(group: GroupCoordinator) -> None:
    """Make a coordinator findable under its unique name for as long as it lives."""
    _groups[group.unique_name] = group


def find(name: str) -> GroupCoordinator:
    """The coordinator of that name. Raises CollectiveError when there is none, or none any more."""
    group = _groups.get(name)
    if group is None:
        base, _, number = name.rpartition(":")
        was_there = number.isdigit() and int(number) < _counters[base]
        raise CollectiveError(
            f"group {name} {'is gone: its coordinator was deleted' if was_there else 'does not exist'}"
        )
    return group
