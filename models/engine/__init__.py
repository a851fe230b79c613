"""Text for many requests at once: a `Decoder` whose keys and values lie in pages."""

from models.engine.engine import Answer as Answer
from models.engine.engine import Engine as Engine
from models.engine.sampling import Sampling as Sampling
