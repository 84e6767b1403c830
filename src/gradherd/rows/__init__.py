"""Per-example gradients, called rows, read off the user's own backward."""

from gradherd.flat import FlatSpec as FlatSpec
from gradherd.rows.capture import Capture as Capture
from gradherd.rows.exact_rows import DenseRows as DenseRows
from gradherd.rows.exact_rows import FactoredRows as FactoredRows
from gradherd.rows.exact_rows import GroupedRows as GroupedRows
from gradherd.rows.exact_rows import Rows as Rows
from gradherd.rows.parameter_owners import describe as describe
from gradherd.rows.sketch import count_sketch as count_sketch
