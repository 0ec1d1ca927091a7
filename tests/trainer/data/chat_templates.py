"""Chat templates that end turns as those of model families do, with their tokenizers."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GEMMA = """{{ bos_token }}{% for m in messages -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}\
{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"""

GLM = """[gMASK]<sop>{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}{{ '\n<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{%- endfor %}{{ '<|assistant|>' if add_generation_prompt }}"""

# Thoughts of all turns but the last are left out, and an empty one is written there.
QWEN = """{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# The opening begins a thought, and messages are written without theirs.
R1 = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% else -%}
<Assistant>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor -%}
{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"""

HARMONY = """{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>
{{- m.content }}{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} \
{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"

_SPECIAL = {
    GEMMA: ("<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    PHI: ("<|endoftext|>", ["<|user|>", "<|assistant|>", "<|end|>"]),
    GLM: ("<|endoftext|>", ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"]),
    QWEN: ("<|im_end|>", ["<|im_start|>"]),
    R1: ("<eos>", ["<User>", "<Assistant>"]),
    HARMONY: ("<|return|>", ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]),
    MISTRAL: ("</s>", ["[INST]", "[/INST]"]),
    MARKED: ("<|im_end|>", ["<|im_start|>"]),
    PLAIN: ("<eos>", []),
}


def tokenizer_of(template: str) -> Any:
    """A tokenizer with a token per byte and one for two line feeds, the family's special tokens, and the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, special = _SPECIAL[template]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=end, extra_special_tokens=special
    )
    fast.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    fast.chat_template = template
    return fast
