"""Why an answer is what it is: what was found, what each passage alone would say, which word rests on which passage."""

from openbook.explain.explanation import Explanation, explain
from openbook.explain.parts import Alone

__all__ = ["Alone", "Explanation", "explain"]
