r"""LaTeX answers without what only changes how they look, and with one spelling for each symbol.

``\textbf{(B)}``, ``\mathrm{(B)}`` and ``{\color{red}(B)}`` are ``(B)``, ``x\le3`` and ``x\leqslant 3`` are ``x≤3``,
and a Greek letter is one character.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["GREEK", "bare_latex"]

_SYNONYMS = {
    "≤": "le leq leqslant leqq",
    "≥": "ge geq geqslant geqq",
    "<": "lt",
    ">": "gt",
    "≠": "ne neq",
    "→": "to rightarrow longrightarrow",
    "←": "gets leftarrow longleftarrow",
    "⇒": "Rightarrow implies Longrightarrow",
    "⇔": "Leftrightarrow iff Longleftrightarrow",
    "*": "cdot cdotp times ast",
    "/": "div",
    "±": "pm",
    "∓": "mp",
    "∞": "infty infin",
    "∪": "cup",
    "∩": "cap",
    "∈": "in",
    "∉": "notin",
    "∅": "emptyset varnothing",
    "°": "degree",
    "∘": "circ",
    "∧": "land wedge",
    "∨": "lor vee",
    "¬": "lnot neg",
    "≈": "approx",
    "≡": "equiv",
    "∼": "sim",
    "∝": "propto",
    "⊥": "perp bot",
    "∥": "parallel",
    "∠": "angle",
    "△": "triangle",
    "∖": "setminus backslash",
    "⊂": "subset",
    "⊆": "subseteq",
    "∀": "forall",
    "∃": "exists",
    "|": "mid vert lvert rvert",
    "‖": "Vert lVert rVert",
    "…": "ldots dots cdots dotsc dotsb",
    "⦃": "lbrace",
    "⦄": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    "⟨": "langle",
    "⟩": "rangle",
    "'": "prime",
    ":": "colon",
    "ℝ": "R reals",
    "\\frac": "frac dfrac tfrac cfrac",
    "\\binom": "binom dbinom tbinom",
    "ε": "epsilon varepsilon",
    "θ": "theta vartheta",
    "π": "pi varpi",
    "ρ": "rho varrho",
    "σ": "sigma varsigma",
    "φ": "phi varphi",
    "κ": "kappa varkappa",
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ζ": "zeta", "η": "eta", "ι": "iota", "λ": "lambda",
    "μ": "mu", "ν": "nu", "ξ": "xi", "ο": "omicron", "τ": "tau", "υ": "upsilon", "χ": "chi", "ψ": "psi", "ω": "omega",
    "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Υ": "Upsilon",
    "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_FONTS = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|textup|textsc|textmd|textsl|mathrm|mathbf|mathit|mathsf|mathtt|"
    "mathnormal|mathbin|mathrel|mathord|mathinner|mathop|boldsymbol|bm|pmb|emph|mbox|hbox|operatorname|underline|uline|"
    "ensuremath|boxed|fbox"
)
_DROPPED = {
    "": (
        "left right middle big Big bigg Bigg bigl bigr bigm Bigl Bigr Bigm biggl biggr Biggl Biggr displaystyle "
        "textstyle scriptstyle limits nolimits bf rm it sf tt em sl bfseries itshape rmfamily upshape normalfont tiny "
        "scriptsize footnotesize small normalsize large Large LARGE huge Huge mathstrut strut protect nonumber "
        "noindent boldmath"
    ),
    " ": "quad qquad enspace thinspace medspace thickspace negthinspace space hfill hfil " + _FONTS.replace("|", " "),
}
GREEK = "".join(symbol for symbol in _SYNONYMS if "Α" <= symbol[0] <= "ω")
_SYMBOL_OF = {name: symbol for symbol, names in (_SYNONYMS | _DROPPED).items() for name in names.split()}
_SIGNS = {
    "{": "⦃", "}": "⦄", ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "%": "%", "$": "$", "&": "&", "#": "#",
    "_": "_", "|": "‖", "(": "", ")": "", "[": "", "]": "", "/": "",
}  # fmt: skip
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "⩽": "≤", "⩾": "≥",
        "≦": "≤", "≧": "≥", "ϵ": "ε", "ϑ": "θ", "ϕ": "φ", "ϱ": "ρ", "ς": "σ", "µ": "μ", "∆": "Δ", "′": "'", "º": "°",
        "∣": "|", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "～": "~", "~": " ",
    }
)  # fmt: skip

_FONT = re.compile(r"\\(?:" + _FONTS + r")\*?\s*\{([^{}]*)\}")
_COLOR = re.compile(r"\\(?:text|math)?color(?:box)?\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}")
_REALS = re.compile(r"\\(?:mathbb|Bbb)\s*(?:\{\s*R\s*\}|R\b)")
_EMPTY = re.compile(r"\\(?:[hv]?phantom|[hv]space\*?|tag\*?|label|fontsize\s*\{[^{}]*\})\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\(?:([a-zA-Z]+)\*?|(.))", re.DOTALL)
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_WIDE = re.compile("[！-～]")
_ONE_CHARACTER_FRACTION = re.compile("[¼-¾⅐-⅞]")
_MOST_NESTED = 40


def bare_latex(text: str) -> str:
    r"""Return ``text`` without fonts, sizes, colors and spacing, with one spelling per symbol.

    What is left of LaTeX are fractions, roots, binomials, scripts, environments and functions by name. ``\{``, ``\}``
    become ``⦃`` and ``⦄``, so that a set is not taken for a group.
    """
    if not text.isascii():
        text = _plain_characters(text)
    if "\\" not in text:
        return text
    if "\\begin" not in text:  # text that was escaped twice: "\\" ends a row only in an environment
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    text = _EMPTY.sub("", _COLOR.sub("", _REALS.sub("ℝ", text)))
    for _ in range(_MOST_NESTED):  # innermost first
        text, found = _FONT.subn(r" \1 ", text)
        if not found:
            break
    text = re.sub(r"\\not\s*=", "≠", re.sub(r"\\not\s*\\in(?![a-zA-Z])", "∉", text))
    return _COMMAND.sub(_plain_command, re.sub(r"\\(left|right|middle)\s*\.", "", text))


def _plain_characters(text: str) -> str:
    text = text.translate(_CHARACTERS)
    text = _WIDE.sub(lambda m: unicodedata.normalize("NFKC", m[0]), text)
    text = _ONE_CHARACTER_FRACTION.sub(_two_parts, text)
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = re.sub(r"√ *\(", r"\\sqrt(", text)
    return re.sub(r"√ *(\w+)", r"\\sqrt{\1}", text)


def _two_parts(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _plain_command(match: re.Match[str]) -> str:
    name, sign = match[1], match[2]
    if name is None:
        return _SIGNS.get(sign, match[0])
    return _SYMBOL_OF.get(name, match[0])
