"""Whether the log-probs of vLLM's engine and of a trainer can be equal to the bit, and what that costs.

`operators.py` has operators whose rows depend on nothing but themselves, `forward.py` a forward pass and `gradients.py`
a training pass from them. `census.py` compares them with vLLM's and torch's, `engine.py` and `trace.py` an engine with
the forward pass, `step.py` their time and gradients with those of the trainer today. `__main__.py` runs each of these
in a process of its own.
"""
