"""Reports: records of runs become comparisons, verdicts, and an HTML page.

Reads records and results only; nothing here touches a tensor.
"""
