from commbench.harness.engine.driver import Engine as Engine
from commbench.types import Point as Point

__version__: str
