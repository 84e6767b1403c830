"""Per-example gradients, called rows, read off the user's own backward."""

from gradherd.flat import FlatSpec as FlatSpec
from gradherd.rows.capture import Capture as Capture
from gradherd.rows.layer_plan import describe as describe
from gradherd.rows.sketch import count_sketch as count_sketch
