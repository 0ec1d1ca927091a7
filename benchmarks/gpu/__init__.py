"""Speed on GPUs: each script measures one thing and appends rows to a JSON-lines file; `table.py` shows them.

Models have random weights and prompts are random: speed needs neither trained weights nor sense.
"""
