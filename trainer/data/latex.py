"""Answers written in LaTeX."""

import re


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}`; None if there is none or its brace never closes.

    What follows `\\boxed` without a brace ends at a dollar sign or the line's end, as in MATH's evaluation.
    """
    start = max(text.rfind(f"\\{command}{after}") for command in ("boxed", "fbox") for after in "{ ")
    if start < 0:
        return None
    command, brace, _ = text[start:].partition("{")
    if not brace or not re.fullmatch(r"\\\w+ *", command):
        bare = re.split(r"[$\n]", text[start:].partition(" ")[2], maxsplit=1)[0]
        return bare.strip() or None
    first = start + len(command)
    depth = 0
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first + 1 : place]
    return None


# In this order: later entries rely on earlier ones.
_SPELT = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"[\u2212\u2013]", "-"),
        (r"[€£]|\\(?:euro|pounds)(?![a-zA-Z])", ""),
        (r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|\\[!;:>]|\\\(|\\\)|\\\$|\$", ""),
        (r"(?<=\d)(?:\{,\}|\\,|\\ |~)(?=\d{3}(?!\d))", ""),  # 1{,}000 and 1\,000
        (r"\\[, ]|~|\\(?:quad|qquad)(?![a-zA-Z])", " "),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?![a-zA-Z])|°", ""),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\?%|\\(?:text|mathrm|mbox)\{\s*(?:percent|\\?%)\s*\}", ""),
        (r"^\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}$", r"\1"),
        (r"(?<=[\d})])\s*\\(?:text|mathrm|mbox)\{[^{}\d]*\}(?:\^\{?[23]\}?)?\s*$", ""),  # a unit
        (r"^(?:[a-zA-Z](?:_\{?\w+\}?)?|[a-zA-Z]\([a-zA-Z]\))\s*=(?=[^=]*$)", ""),  # x=5
        (r"^(-?\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),  # 9 1/2
        (r"\.\s*$", ""),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"(?<!\d)(\d{1,9})\.(\d{0,9})\\overline\{(\d{1,9})\}", lambda match: _repeating(*match.groups())),
    )
)


def plain_latex(answer: str) -> str:
    """The answer as MATH's evaluation compares it (Hendrycks et al. 2021, arXiv:2103.03874): without units, percent
    and dollar signs, degrees, what only sets it, and a variable before `=`; `\\frac12` is `\\frac{1}{2}`."""
    text = answer.strip()
    for pattern, plain in _SPELT:
        text = pattern.sub(plain, text).strip()
    return text


def _repeating(whole: str, once: str, again: str) -> str:
    """A repeating decimal as a fraction."""
    denominator = 10 ** len(once) * (10 ** len(again) - 1)
    numerator = int(whole + once + again) - int(whole + once)
    return f"\\frac{{{numerator}}}{{{denominator}}}"
