"""The published claims of the recipes that this project replaces, each measured beside a baseline.

`published.py` lists the claims, `python -m benchmarks.gpu.claims` measures them, `page.py` writes measured/claims.md.
Each of the other modules measures one kind of claim: `measure(options)` returns the facts of the job and the figures of
both sides.
"""
