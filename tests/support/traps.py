"""Pairs of texts that look alike and state different facts, or might: none may be accepted.

`\\n` and `\\t` in the tables stand for a line's end and a tab; `\\u200b` for that character.
"""

# ruff: noqa: E501 - a pair stands on a line

from __future__ import annotations

import re

_TRAPS = {
    "scope of only": """
        The shop only sells fish on Fridays. | On Fridays the shop only sells fish.
        The shop sells only fish. | Only the shop sells fish.
    """,
    "negation": """
        The tenor does not sing like the baritone. | Like the baritone, the tenor does not sing.
        She did not resign as the board had asked. | As the board had asked, she did not resign.
        The station is not close. | The station is not shut.
        I do not pay because of Bob. | Because of Bob, I do not pay.
        His plan is not to pay. | His plan isn't to pay.
        He could not answer. | He couldn't answer.
        You can not go. | You can't go.
        Did not one person come? | Didn't one person come?
        They did not like one man but two. | They didn't like one man but two.
        You must not pay. | You needn't pay.
    """,
    "order": """
        The valve was closed and the pump was started. | The pump was started and the valve was closed.
        The clerk called. The manager was out. She was angry. | The manager was out. She was angry. The clerk called.
        Alice is here and Bob is away. | Bob is away and Alice is here.
        We don't have the new card. | We don't have the card new.
    """,
    "questions and roles": """
        Let me know when the parcels arrive. | When do the parcels arrive?
        Who do I need to call about the leak? | Who is needed to call about the leak?
        Could you tell me when we close? | When do we close?
        Do you know if I can pay? | Can I pay?
        You paid. | You paid?
        You paid | You paid.
        How do I pay | How do I pay?
        Could you send me the bill? | Send me the bill.
    """,
    "modality": """
        Where do I work today? | Where can I work today?
        The keys must be in the red car. | The keys need to be in the red car.
        How do I pay? | How can I pay?
        I'll pay the bill. | I will pay the bill.
        I'll pay the bill. | I shall pay the bill.
        They'd paid the bill. | They would paid the bill.
    """,
    "numbers": """
        The path passes over 3 bridges before the farm. | The path passes more than 3 bridges before the farm.
        It is up to 3 people in the office to decide. | It is at most 3 people in the office to decide.
        Part 2E5 is out of stock. | Part 200000 is out of stock.
        There are 2E5 users. | There are 200000 users.
        There are 1e3 users. | There are 1,000 users.
        There are 10k users. | There are 10000 users.
        There are 1.500 users. | There are 1500 users.
        There are 1,50 users. | There are 150 users.
        There are 1, 500 users. | There are 1500 users.
        There are 007 guests. | There are 7 guests.
        There are 0,500 guests. | There are 0500 guests.
        There are -5 guests. | There are 5 guests.
        The beam is 1,500 metres long. | The beam is 1500 metres long.
        We sold the lots 1,200 and 7. | We sold the lots 1200 and 7.
        I saw the 1,500 runners. | I saw the 1500 runners.
        We are in room 1,500 people say. | We are in room 1500 people say.
        Can the 747 passengers leave? | Can the seven hundred passengers leave?
        The guests of Seven are here. | The guests of 7 are here.
        There were Seven guests. | There were 7 guests.
        We have two thousand users. | We have 2 thousand users.
        Turn to page five of it. | Turn to page 5 of it.
        The year was 1,984 in all. | The year was 1984 in all.
        The code has 1,500 users. | The code has 1500 users.
        There were twenty one guests. | There were 21 guests.
        There are a hundred guests. | There are 100 guests.
    """,
    "words of two meanings": """
        Drivers stop to eat at the border. | Drivers cease to eat at the border.
        What's the team lost? | What is the team lost?
        What's the sign cost? | What is the sign cost?
        Who's left of the guests? | Who is left of the guests?
        The dog's left in the car. | The dog is left in the car.
        It's eaten by now. | It has eaten by now.
        Let's go to the car. | Let us go to the car.
        We're late for it. | Were late for it.
        They wont to go there. | They won't to go there.
        Its late for us. | It's late for us.
        He read the cant of it. | He read the can't of it.
        When can i be zero? | When can I be zero?
        Do i and j have to differ? | Do I and j have to differ?
        How do I polish it? | How do I Polish it?
        Is it for us? | Is it for US?
        She may be in it. | She May be in it.
    """,
    "courtesies that are content": """
        Morning, take two pills. | Evening, take two pills.
        Morning, take two pills. | Take two pills.
        Good morning, take two pills. | Take two pills.
        Please the crowd. | The crowd.
        Please customers first. | Customers first.
        Please yourself. | Yourself.
        Please, and send the cake with it. | And send the cake with it.
        Would you please the boss? | The boss.
        Could you please the children? | Could you the children?
        Could you please not send me the bill? | Send me the bill.
        Please do not send me the bill. | Send me the bill.
        Could they please send me the bill? | Send me the bill.
        Please send me the bill? | Send me the bill.
        Could you please send me the bill, or is it lost? | Send me the bill, or is it lost.
        Hello, how do I spell that? | How do I spell that?
        Hello, how do I spell hello? | How do I spell hello?
        Hi, how do I translate this? | How do I translate this?
        Hey, can I say that to him? | Can I say that to him?
        Hi, what is the meaning? | What is the meaning?
        Hello, what are the lyrics? | What are the lyrics?
        Hello, when did I greet you? | When did I greet you?
        Please, how do I ask politely? | How do I ask politely?
        How do I please? | How do I?
        How do I please my boss? | How do I my boss?
        Where can I go, please, or stay? | Where can I go, or stay?
        What can I do to tease, flatter, please? | What can I do to tease, flatter?
        What is the magic word, please? | What is the magic word?
        Hello Dan, how do I pay? | How do I pay?
        Hi, Ann, how do I pay? | Hi, how do I pay?
        Mum, how do I pay? | How do I pay?
        Bye, how do I pay? | How do I pay?
        No, thanks. | No.
        Yes, please. | Yes.
        Never, please. | Never.
        Right, send me the bill. | Send me the bill.
        Then tell me the time. | Tell me the time.
        Still, can I pay? | Can I pay?
        Ask him how do I pay, please. | Ask him how do I pay.
    """,
    "what is named or quoted": """
        Play the song I'm yours. | Play the song I am yours.
        I'm a Celebrity is on. | I am a Celebrity is on.
        Don't Look Up is on. | Do Not Look Up is on.
        You don't know Jack is on. | You do not know Jack is on.
        Turn off do not disturb. | Turn off don't disturb.
        Do not track is on. | Don't track is on.
        Type we don't know in the box. | Type we do not know in the box.
        He said they don't pay. | He said they do not pay.
        The motto is we don't sell. | The motto is we do not sell.
        How do I fix the file doesn't exist error? | How do I fix the file does not exist error?
        The password is they don't have it. | The password is they do not have it.
        The password is red  horse. | The password is red horse.
        They said: we don't have it. | They said: we do not have it.
        "We don't have it." | "We do not have it."
        'We don't have it.' | 'We do not have it.'
        \u201cWe don't have it.\u201d | \u201cWe do not have it.\u201d
        > We don't have it. | > We do not have it.
        He said "no" to it. | He said no to it.
        The word is \u201cyes\u201d. | The word is "yes".
        Ask for room A-17. | Ask for room A17.
    """,
    "other languages": """
        Der Kran hebt 1,500 kg. | Der Kran hebt 1500 kg.
        Da sind were 1,500 visitors. | Da sind were 1500 visitors.
        Nous avons are 1,500 visitors. | Nous avons are 1500 visitors.
        I read Der Kran hebt 1,500 kg. | I read Der Kran hebt 1500 kg.
        In der Halle were 1,500 visitors. | In der Halle were 1500 visitors.
        Ich zahle heute nicht. | Ich  zahle heute nicht.
        Er wohnt in Stra\u00dfe 5. | Er wohnt in Strasse 5.
        \u6211\u6b20\u4f60 5 | \u6211\u6b20\u4f60  5
    """,
    "characters": """
        Is the \ufb01le in it? | Is the file in it?
        Is x\u00b2 in it? | Is x2 in it?
        Take \uff15 of them. | Take 5 of them.
        Call \u0430nna about it. | Call anna about it.
        Go to pay\u200bpal with it. | Go to paypal with it.
        They re\u00adsign it. | They resign it.
        It takes 5\u201310 of them. | It takes 5-10 of them.
        Open re\u0301sume\u0301.txt for me. | Open r\u00e9sum\u00e9.txt for me.
        `e\u0301` | `\u00e9`
        We met D\u2019Arcy there. | We met D'Arcy there.
        The k\u0131l is here. | The kil is here.
    """,
    "punctuation": """
        Let's eat, Grandma. | Let's eat Grandma.
        I met my mother, Ann and Al. | I met my mother, Ann, and Al.
        How do I call empty?? | How do I call empty?
        How do I call destroy!? | How do I call destroy?
        How do I call empty ? | How do I call empty?
        What is ten! | What is ten.
        Stop! | Stop.
        They re-sign it. | They resign it.
        Is it the students' car? | Is it the student's car?
        He left; she stayed. | He left. She stayed.
        Wait for it... | Wait for it.
        It is 5.5 of them. | It is 5 5 of them.
        (We don't have it.) | We don't have it.
    """,
    "white space": """
        Alice     5 | Alice  5
        name  jan  feb | name jan feb
        1.\\tWe pay. | 1. We pay.
        We don't have milk.\\nWe have eggs. | We don't have milk. We have eggs.
        We have milk.\\n | We have milk.\\n\\t
        We have  milk in it. | We have milk in it.
        We have milk.   We have eggs. | We have milk. We have eggs.
        We have milk.\\n    x | We have milk.\\nx
        - a\\n  - b | - a\\n- b
    """,
    "code": """
        if a:\\n    b()\\n    c() | if a:\\n    b()\\nc()
        if a:\\n\\tb() | if a:\\n    b()
        '$HOME' | "$HOME"
        x = 1; x = 2 | x = 2; x = 1
        !important.log | important.log
        ```\\nWe don't have it.\\n``` | ```\\nWe do not have it.\\n```
        `We don't have it.` | `We do not have it.`
        # We don't have it. | # We do not have it.
        // There are 1,500 users. | // There are 1500 users.
        print("There are five users.") | print("There are 5 users.")
        Call print(x) with it. | Call print (x) with it.
        There are [five users]. | There are [5 users].
        SELECT a  FROM b | SELECT a FROM b
        ls --all  a | ls --all a
        a && b | b && a
        a == b | a = b
        path/to/a | path/to//a
        x_1 is in it. | x1 is in it.
        f(1,500) | f(1500)
        [1,500] | [1500]
        "a": "don't" | "a": "do not"
        $5 and 1,000 | $5 and 1000
        There are 1,500; users. | There are 1500; users.
        **We don't have it.** | We don't have it.
    """,
}  # fmt: skip


def pairs(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """Kind, donor and recipient of each line of a table."""
    return [
        (kind, *(_plain(text) for text in line[8:].split(" | ")))  # type: ignore[misc]
        for kind, block in table.items()
        for line in block.split("\n")
        if line.strip()
    ]


def _plain(text: str) -> str:
    return re.sub(r"\\([nt])", lambda match: {"n": "\n", "t": "\t"}[match[1]], text)


TRAPS = pairs(_TRAPS)
