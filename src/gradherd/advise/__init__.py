"""Predict whether a sparse exchange pays, from a few numbers about a cluster and a model.

`choices` knows what collectives and methods cost and predicts a step for each exchange and
order, `decide` recommends one; all of it is arithmetic on plain numbers, which
`gradherd advise --measure` measures.
"""
