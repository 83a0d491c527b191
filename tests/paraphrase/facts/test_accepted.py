"""The same facts in another notation, spelling, order or frame: not refused."""

from __future__ import annotations

import pytest

from kvweave.fuzzy.facts import differing, lengths_compatible

ACCEPTED = {
    "numbers": """
        The limit is 1,000 users. | The limit is 1000 users.
        The limit is 1,000 users. | The limit is one thousand users.
        The limit is 1000 users. | The limit is 1e3 users.
        The limit is 10k users. | The limit is 10,000 users.
        Twenty-one people came. | 21 people came.
        Two thousand and five people came. | 2005 people came.
        Twelve hundred people came. | 1,200 people came.
        between one hundred and two hundred | between 100 and 200
        2.5 million people | 2,500,000 people
        It rose by 5%. | It rose by five percent.
        It rose by 5 per cent. | It rose by 5 %.
        one half of it | 1/2 of it
        two thirds of it | 2/3 of it
        ½ of it | 1/2 of it
        He came 2nd. | He came second.
        It takes 5-10 days. | It takes 5 to 10 days.
        It takes 5\u201310 days. | It takes 5 to 10 days.
        a 2-year contract | a two-year contract
    """,
    "units": """
        5kg of rice | 5 kilograms of rice
        It costs $1,000.50. | It costs 1000.5 dollars.
        It costs £2m. | It costs £2 million.
        It costs 100 EUR. | It costs €100.
        It is -20 °C. | It is minus twenty degrees Celsius.
        It is \u221220 C. | It is -20 C.
        10 km/h | 10 km / h
    """,
    "comparisons": """
        at least 5 people | ≥ 5 people
        more than 5 people | over 5 people
        no more than 5 people | up to 5 people
        under 5 euros | less than 5 euros
        if x≤5 | if x <= 5
    """,
    "dates and times": """
        It starts on March 1, 2024. | It starts on 2024-03-01.
        It starts on the 1st of March 2024. | It starts on the 1 Mar 2024.
        It starts on 25/12/2024. | It starts on December 25th, 2024.
        We meet at 3pm. | We meet at 15:00.
        We meet at 3:30 p.m. | We meet at 15:30.
        We close at noon. | We close at 12 pm.
        We meet on Mon. | We meet on Monday.
    """,
    "spelling": """
        The colour of the centre is grey. | The color of the center is gray.
        We organised the travelling. | We organized the traveling.
        He doesn't pay. | He does not pay.
        He doesnt pay. | He does not pay.
        It\u2019s here. | It is here.
        Use the Wi-Fi. | use the wifi
        Send an e-mail. | Send an email.
        She moved to the U.S. | She moved to the US.
        the U.K. and the USA | the UK and the United States
    """,
    "order": """
        Alice has paid. Bob has left. | Bob has left. Alice has paid.
        Alice is here and Bob is away. | Bob is away and Alice is here.
        Alice is here, Bob is away and Carol is ill. | Carol is ill. Bob is away. Alice is here.
        If it rains, we stay home. | We stay home if it rains.
        On Monday we close at 5. | We close at 5 on Monday.
        In Rome, Bob paid 5 euros. | Bob paid 5 euros in Rome.
        Do You Rent A Large Car? | Do you rent a big car?
        In Rome, how do I park? | How do I park in Rome?
        The fee is 5 euros. Bob paid it. Dan is ill. | Dan is ill. The fee is 5 euros. Bob paid it.
    """,
    "questions": """
        How do I reset my password? | How can I reset my password?
        How do I reset my password? | What are the steps to reset my password?
        How do I submit a claim? | What's the process for submitting a claim?
        Could you tell me how I reset my password? | How do I reset my password?
        Can I pay by card? | Is it possible to pay by card?
        What must I bring? | What do I need to bring?
        Where can I park? | Where do I park?
        How much is the ticket? | What is the price of the ticket?
        how do i pay | How do I pay?
        Have you got a map? | Do you have a map?
    """,
    "courtesies": """
        Hi team, how do I pay? | How do I pay?
        How do I pay, please? Many thanks! | How do I pay?
        um so how do i pay | How do I pay?
        Hello, I hope you are well. How do I pay? Kind regards | How do I pay?
        Right, how do I pay? | How do I pay?
        Do you know if I can pay later? | Can I pay later?
        Good morning! How do I pay? | How do I pay?
    """,
    "words": """
        How do I buy a ticket? | How do I purchase a ticket?
        The shop begins selling. | The store starts selling.
        How do I switch supplier? | How can I change supplier?
        You can book a table. | You can reserve a table.
        Turn on alerts. | Switch on alerts.
        Because of the rain | Due to the rain
        He pays each month. | He pays every month.
    """,
    "languages": """
        Ich zahle heute nicht. | Ich  zahle heute nicht.
        \u6211\u6b20\u4f60\u3002 | \u6211\u6b20\u4f60\u3002\x20
    """,
}
PAIRS = [
    pytest.param(*line.strip().split(" | "), id=f"{kind}: {line.strip()}")
    for kind, block in ACCEPTED.items()
    for line in block.strip().splitlines()
]


@pytest.mark.parametrize(("donor", "recipient"), PAIRS)
def test_the_same_facts_are_not_refused(donor: str, recipient: str) -> None:
    assert differing(donor, recipient) is None
    assert differing(recipient, donor) is None


def test_lengths_far_apart_cannot_say_the_same() -> None:
    assert lengths_compatible(10, 40)
    assert not lengths_compatible(10, 80)
    assert not lengths_compatible(800, 100)
