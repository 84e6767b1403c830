"""Which gradient coordinates travel: select, exchange, average, and lose nothing."""
