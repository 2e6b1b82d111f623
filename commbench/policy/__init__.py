"""Engine dispatch policies as data, and their evaluator. No torch.

``load_policy("sglang-0.5.3").decide(call, platform)`` says which backend a call takes and why not the others.
"""

from commbench.policy.evaluate import Bound, Policy, Threshold, Verdict, load_policy
from commbench.policy.load import shipped


def list_policies() -> tuple[str, ...]:
    """The names of the shipped policies."""
    return shipped()


__all__ = ["Bound", "Policy", "Threshold", "Verdict", "list_policies", "load_policy"]
