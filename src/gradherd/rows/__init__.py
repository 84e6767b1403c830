"""Where a gradient is read: what each example's gradient was in the user's own backward."""

from gradherd.rows.capture import Capture as Capture
from gradherd.rows.flat import FlatSpec as FlatSpec
from gradherd.rows.owners import describe as describe
from gradherd.rows.rows import DenseRows as DenseRows
from gradherd.rows.rows import FactoredRows as FactoredRows
from gradherd.rows.rows import Grouped as Grouped
from gradherd.rows.rows import Rows as Rows
from gradherd.rows.sketch import count_sketch as count_sketch
