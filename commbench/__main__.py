"""``python -m commbench`` is the same program as ``commbench``."""

from commbench.cli import main

if __name__ == "__main__":
    main()
