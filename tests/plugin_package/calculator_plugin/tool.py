"""The environment: one tool, and what the model sees of its result."""

import asyncio
import re

CALL = re.compile(r"<calc>([^<]*)</calc>")
ALLOWED = re.compile(r"[0-9+\-*() ]{1,64}")


def find_call(text):
    """The expression of the first tool call in `text`, or None."""
    match = CALL.search(text)
    return match.group(1) if match else None


async def run_calculator(expression):
    """The value of a sum as text; anything else gets an error text, never an exception."""
    await asyncio.sleep(0)  # a real tool waits here
    if not ALLOWED.fullmatch(expression):
        return "error: not a sum"
    try:
        return str(eval(expression, {"__builtins__": {}}))
    except (SyntaxError, ZeroDivisionError, TypeError) as error:
        return f"error: {type(error).__name__}"


def observation(result):
    return f"\n<result>{result}</result>\n"
