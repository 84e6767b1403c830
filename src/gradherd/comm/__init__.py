"""Communication between ranks: the world, collectives that count bytes, and scripts of them."""
