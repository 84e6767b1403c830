"""`stripe` under its former address."""

from gradherd.ordering.sharding import stripe as stripe
