"""What the tenants of the lab say: natural text with a secret that no run ever repeats.

Every trial draws its own text from its own generator, so a trial can be repeated by its seed.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

Count = Callable[[str], int]
"""Tokens of a chat request with this one user message."""

_PLACES = ("archive", "cold room", "east gate", "laboratory", "records office", "vault")
_PEOPLE = ("Ines", "Tomasz", "Akiko", "Farid", "Maren", "Oluchi", "Pavel", "Sunniva")
_MEMO = (
    "{name} keeps the register in the room on the second floor.",
    "The windows of the first room face the yard, and the paper there has turned yellow.",
    "Every spring the clerks count the folders and write the number into a green book.",
    "{name} asked for a second lamp above the long table, because the evenings are dark.",
    "The maps of the river and its dams hang in the corridor beside the stairs.",
    "On Tuesdays the courier brings the letters before nine and leaves by the side door.",
    "{name} will speak with the landlord about the damp wall behind the shelves.",
    "The old catalogue is to be copied by hand before it falls apart.",
    "Visitors wait downstairs until {name} has signed the list.",
    "The heating is switched off at six, and nobody has complained so far.",
    "{name} found two boxes without labels and put them on the lowest shelf.",
    "The next inspection is expected in October, when the new shelves are in place.",
)
_GARDEN = (
    "I sowed the beans in the first week of May, two to each hole, and most of them came up.",
    "The soil near the fence is heavy clay, and water stands on it for days after rain.",
    "My neighbour grows tomatoes against a white wall and picks them until the first frost.",
    "The apple tree has had small brown spots on its leaves since the middle of June.",
    "I water in the evening with a can, about ten litres for each bed.",
    "Last year the slugs ate nearly all of the lettuce within one week.",
    "There is a heap of compost behind the shed which is now two years old.",
    "The mint has spread into the path, and I cut it back every second Sunday.",
    "A hedge of hazel keeps the wind off, but it takes the light from the onions.",
    "I have read that marigolds keep some insects away from the carrots.",
)
_SHOP = (
    "The bicycle shop opens at ten and closes at seven, except on Mondays.",
    "A new chain costs twenty euros, and the work is done while you wait.",
    "Most customers come in March, when the first warm days bring everybody out.",
    "The brakes of the blue bicycle squeal when it rains.",
    "Two wheels are waiting for spokes that were ordered three weeks ago.",
)


class Story(NamedTuple):
    """One trial's texts, each one user message. ``secret`` stands verbatim in ``document`` and
    nowhere else."""

    secret: str
    document: str
    question: str


def draw_secret(rng: random.Random) -> str:
    """Twelve digits in three groups: 40 bits, so that no answer holds them by chance."""
    return " ".join(f"{rng.randrange(10_000):04d}" for _ in range(3))


def tell(rng: random.Random, count: Count, document_tokens: int, question_tokens: int) -> Story:
    """Texts that come as near to the two token counts as whole sentences allow: the document from
    below, the question from above."""
    secret = draw_secret(rng)
    place = rng.choice(_PLACES)
    line = f"The access code of the {place} is {secret}."
    ask = f"\n\nWhat is the access code of the {place}?"
    head = f"Internal memo, not for other companies. {line} "
    document = _grow(rng, _MEMO, count, document_tokens, head, f"Please remember: {line}{ask}")
    head = "Here are my notes about the garden. "
    question = _grow(rng, _GARDEN, count, question_tokens, head, "\n\nWhat should I plant next?")
    while count(question) < question_tokens:
        question = question.replace(head, f"{head}{rng.choice(_GARDEN)} ", 1)
    return Story(secret, document, question)


def small_talk(rng: random.Random, count: Count, tokens: int) -> str:
    """A third tenant's message of exactly ``tokens`` tokens."""
    text = _grow(rng, _SHOP, count, tokens, "", "When does the shop open?")
    while count(text) < tokens:
        text += " Please"
    return text


def _grow(
    rng: random.Random,
    sentences: tuple[str, ...],
    count: Count,
    tokens_max: int,
    head: str,
    tail: str,
) -> str:
    """``head``, as many drawn sentences as fit, ``tail``."""
    body, order = "", list[str]()
    while True:
        order = order or rng.sample(sentences, len(sentences))
        more = body + order.pop().format(name=rng.choice(_PEOPLE)) + " "
        if count(head + more + tail) > tokens_max:
            return head + body + tail
        body = more
