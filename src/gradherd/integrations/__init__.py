"""gradherd in training frameworks: one module for each, imported only when you use it."""
