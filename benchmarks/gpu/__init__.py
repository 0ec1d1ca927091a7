"""Speed on GPUs. Each script measures one thing and appends rows to a JSON-lines file.

`session.py` runs them all on a host, `table.py` puts the rows into measured/tables.md, `measured.jsonl` holds these.

Models have random weights and prompts are random: speed needs neither trained weights nor sense.
"""
