from commbench.harness.engine import Engine as Engine
from commbench.types import Point as Point

__version__: str
