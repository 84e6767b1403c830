"""Will it pay here? Predicted times of a step, from a few numbers about a cluster and a model.

`link` knows what collectives cost, `choices` what each way to exchange gradients costs, `decide`
which one to take; all of it is arithmetic on plain numbers. `measure` finds the numbers.
"""
