"""Published data sets as files of prompts or pairs: from the Hugging Face hub, from a local copy, or made up."""
