"""A calculator as a tool for the policy.

--rollout-tools examples.calculator.calculate --apply-chat-template
"""

from __future__ import annotations

import ast
import operator
from typing import Any

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
OPERATORS |= {ast.Div: operator.truediv, ast.USub: operator.neg}


def calculate(expression: str) -> float:
    """Compute an expression of numbers, + - * / and parentheses.

    Args:
        expression: for example 3 * (4 + 5).
    """

    def value(node: Any) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in OPERATORS:
            parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            return OPERATORS[type(node.op)](*map(value, parts))
        raise ValueError("only numbers, + - * / and parentheses are known")

    return value(ast.parse(expression[:200], mode="eval").body)
