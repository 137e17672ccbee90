"""Control questions: short, natural, and with one answer that a model is sure of.

Where a model is sure, arithmetic that differs a little does not change its greedy answer. Prompts
of random letters are no such thing: more than a tenth of their answers differ with the batch alone.
"""

import msgspec


class Control(msgspec.Struct, frozen=True):
    """A question, and what its answer is expected to hold, in lower case."""

    question: str
    known: str


CONTROLS = tuple(
    Control(question, known)
    for question, known in (
        ("What is the capital of France?", "paris"),
        ("What is the capital of Japan?", "tokyo"),
        ("What is the capital of Italy?", "rome"),
        ("What is the capital of Egypt?", "cairo"),
        ("What is the capital of Spain?", "madrid"),
        ("What is the capital of Russia?", "moscow"),
        ("How much is two plus two?", "4"),
        ("How much is five times five?", "25"),
        ("How much is ten minus three?", "7"),
        ("How much is one hundred divided by two?", "50"),
        ("How many days has a week?", "seven"),
        ("How many months has a year?", "12"),
        ("How many legs has a spider?", "eight"),
        ("Continue the list: Monday, Tuesday, Wednesday,", "thursday"),
        ("Continue the list: January, February, March,", "april"),
        ("Continue the list: one, two, three, four,", "five"),
        ("Continue the list: 10, 20, 30, 40,", "50"),
        ("What do bees make?", "honey"),
        ("Which planet do we live on?", "earth"),
        ("Which colour has the sky on a clear day?", "blue"),
        ("What is the opposite of hot?", "cold"),
        ("What is the opposite of day?", "night"),
        ("What is frozen water called?", "ice"),
        ("Which animal says meow?", "cat"),
    )
)
