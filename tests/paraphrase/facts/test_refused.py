"""Near misses and traps: each pair differs in a fact, or might, and none may be served."""

from __future__ import annotations

import pytest

from kvweave.paraphrase.facts import differing
from support.traps import TRAPS, pairs

REFUSED = {
    "negation": """
        The deposit is refundable. | The deposit is not refundable.
        The deposit is refundable. | The deposit is non-refundable.
        You can cancel at any time. | You can't cancel at any time.
        You can cancel at any time. | You cannot cancel at any time.
        Please cancel it. | Please don't cancel it.
        They always pay. | They never pay.
        He still works here. | He no longer works here.
        Travel with a visa. | Travel without a visa.
        It is safe with alcohol. | It is unsafe with alcohol.
        Nobody was hurt. | Somebody was hurt.
        I need not pay. | I must not pay.
        Nobody needs to pay. | Nobody must pay.
        You don't need to pay. | You must not pay.
        I do not pay because of Bob. | Because of Bob, I do not pay.
        Neither of them came. | Both of them came.
        He hardly slept. | He slept.
    """,
    "antonyms": """
        How do I increase the limit? | How do I decrease the limit?
        How do I enable alerts? | How do I disable alerts?
        Allow pop-ups in the browser. | Deny pop-ups in the browser.
        Turn on the heating. | Turn off the heating.
        What does the policy include? | What does the policy exclude?
        The gate is open. | The gate is closed.
        We buy gold. | We sell gold.
        How do I subscribe? | How do I unsubscribe?
        Opt in to the scheme. | Opt out of the scheme.
        Log in to the site. | Log out of the site.
        How do I lock the card? | How do I unlock the card?
        Sign the form before you pay. | Sign the form after you pay.
        Payments are due before Friday. | Payments are due after Friday.
    """,
    "roles": """
        Alice owes Bob 5 dollars. | Bob owes Alice 5 dollars.
        Alice paid Bob and Carol paid Dan. | Carol paid Bob and Alice paid Dan.
        Alice and Bob paid Carol. | Bob paid Carol and Alice.
        Alice is owed 5 dollars. | Alice owes 5 dollars.
        Alice is paid. | Alice paid.
        The dog bit the man. | The man bit the dog.
        Convert a Word file to PDF. | Convert a PDF file to Word.
        The train from Rome to Pisa is late. | The train from Pisa to Rome is late.
        Alice is taller than Bob. | Bob is taller than Alice.
        The dog of Alice in the house of Bob | The dog of Bob in the house of Alice
        I owe her money. | She owes me money.
        My manager approved your leave. | Your manager approved my leave.
        Alice paid. She left. Carol came. | Alice paid. Carol came. She left.
        While Al is in, Bob is out. Carol is ill. | While Al is in, Carol is ill. Bob is out.
        If A is true, B is false. C is here. | If A is true, C is here. B is false.
        Stay if it rains, leave if it snows. | Leave if it rains, stay if it snows.
        Open before 5, close after 9. | Open after 9, close before 5.
        Bob said Al is in and Carol is away. | Carol is away and Bob said Al is in.
        On Monday she said that he left. | She said that he left on Monday.
        In May he wrote whose it was. | He wrote whose it was in May.
        At noon they decided to leave. | They decided to leave at noon.
        After lunch tell Ann to call Bob. | Tell Ann to call Bob after lunch.
    """,
    "order of steps": """
        First, sign. Then pay. | First, pay. Then sign.
        Pour the acid. Add the water. | Add the water. Pour the acid.
        red, green, blue | green, blue, red
        1, 2, 3 | 2, 3, 1
    """,
    "numbers": """
        It costs 15 euros. | It costs 50 euros.
        It costs 100 euros. | It costs 1,000 euros.
        About 1.5 percent | About 15 percent
        She has three children. | She has four children.
        5 of 12 passed. | 12 of 5 passed.
        One thousand users | Ten thousand users
        2.5 million people | 2.5 billion people
        a 2-year contract | a 5-year contract
        He came 2nd. | He came 3rd.
        1/2 of the cake | 1/3 of the cake
        from 5 to 10 people | from 10 to 5 people
        between 5 and 10 | between 5 and 12
        Python 3.1 | Python 3.10
        the 1st quarter | the first half
        1,5 | 1.5
        It costs 1.000 euros. | It costs 1 euro.
        It costs $1.500. | It costs $1.5.
        1,5 kg | 1, 5 kg
        5 \u2013 10 | 5, 10
        5\u201410 | 5, 10
        He has 2 sons and 3 daughters. | He has 3 sons and 2 daughters.
    """,
    "units": """
        It weighs 5 kg. | It weighs 5 lb.
        It is 5 km away. | It is 5 miles away.
        It is 5 km away. | It is 5000 m away.
        It takes 60 minutes. | It takes 60 seconds.
        It takes 1 hour. | It takes 60 minutes.
        The price is $50. | The price is 50 euros.
        The price is 50 USD. | The price is 50 AUD.
        It is 50 pounds. | It is 50 lb.
        It is £50. | It is 50 pounds.
        10 MB | 10 Mb
        It is 20 degrees Celsius. | It is 20 degrees Fahrenheit.
        5 percent | 5 percentage points
        5% of it | 5 of it
        Take 5 mg. | Take 5 mcg.
    """,
    "signs": """
        It is -20 C. | It is 20 C.
        It is minus twenty degrees. | It is twenty degrees.
        The change was +5%. | The change was -5%.
        The balance is -$40. | The balance is $40.
        It is \u221220 °C. | It is 20 °C.
        10 - 5 | 10, 5
        (a + b) * c | a + b * c
    """,
    "comparisons": """
        if x < 5 | if x > 5
        if x <= 5 | if x < 5
        if x ≥ 5 | if x > 5
        Orders under 50 euros | Orders over 50 euros
        At least 5 people | At most 5 people
        More than 5 people | Less than 5 people
        up to 5 people | 5 people
        no more than 5 people | more than 5 people
        About 5 people | Exactly 5 people
    """,
    "dates and times": """
        It starts in March. | It starts in April.
        It starts on March 5. | It starts on April 5.
        It starts on 5 March 2024. | It starts on 5 March 2025.
        It starts on 2024-03-01. | It starts on 2024-01-03.
        from March to April | from April to March
        We meet on Monday. | We meet on Tuesday.
        We meet on Monday. | We meet on Mondays.
        We meet at 3pm. | We meet at 3am.
        We meet at 3. | We meet at 3pm.
        We meet at 3:15. | We meet at 3:50.
        We meet at 3:00. | We meet at 3 am.
        on 05/03/2024 | on March 5, 2024
        We met yesterday. | We meet tomorrow.
    """,
    "names": """
        Alice, Bob and Carol signed. | Alice, Bob and Dave signed.
        the capital of Australia | the capital of Austria
        Take amoxicillin daily. | Take atorvastatin daily.
        She moved to the US. | She moved to us.
        Vitamin A helps. | Vitamin B helps.
        Vitamin A helps. | Vitamin helps.
        I met Alice, Bob and Carol. | I met Alice Bob and Carol.
        What is plan B? | What is plan C?
    """,
    "identifiers": """
        He banks with the Big Bank. | He banks with the Large Bank.
        Big Bank called. | Large Bank called.
        Ask the Bike Store. | Ask the Bicycle Shop.
        Restart shop-api. | Restart store-api.
        Type "start" to go on. | Type "begin" to go on.
        Set X = 5 in it. | Set x = 5 in it.
        Call print(Name) with it. | Call print(name) with it.
        Set price = 5 in it. | Set cost = 5 in it.
        Track order 48213. | Track order 48231.
        Orders A-17, B-22 and C-35 are late. | Orders A-17, B-23 and C-35 are late.
        Order 0123 | Order 123
        Ticket INC-4471 | Ticket INC-4477
        Restart billing-eu. | Restart billing-us.
        Open report.txt. | Open report.csv.
        Mail bob@example.com. | Mail bob@example.org.
        See https://example.com/a?b=1. | See https://example.com/a?b=2.
        See https://example.com/Ab | See https://example.com/aB
        Commit 9f8e7d6 | Commit 9f8e7d7
        id 123e4567-e89b-12d3-a456-426614174000 | id 123e4567-e89b-12d3-a456-426614174001
        Install 1.2.3. | Install 1.2.4.
        The key is aBcDeF. | The key is AbCdEf.
        Set myName to 1. | Set myname to 1.
        Copy /etc/hosts. | Copy /etc/host.
        Copy C:\\a\\b.txt. | Copy C:\\a\\c.txt.
        the iPhone 14 | the iPhone 15
        channel #4 | channel 4
    """,
    "words of two meanings": """
        The book is here. | The reserve is here.
        The switch is broken. | The change is broken.
        The show is at 5. | The display is at 5.
        The shop is close. | The shop is shut.
        What is the flat fee? | What is the apartment fee?
        Show times are listed. | Display times are listed.
    """,
    "quantities": """
        All users can log in. | Some users can log in.
        Every user can log in. | No user can log in.
        Most users agreed. | All users agreed.
        Few users complained. | A few users complained.
        Only the user can log in. | The only user can log in.
        Any file will do. | Every file will do.
        He ate half of it. | He ate all of it.
        Delete the file. | Delete the files.
    """,
    "questions": """
        Who signed it? | When was it signed?
        What is the fee? | Why is there a fee?
        How many people came? | How much did it cost?
        Where can I park? | When can I park?
        You paid. | You paid?
        Can I pay by card? | Must I pay by card?
        How long do I have to pay? | How long must I pay?
        Right. Pay Bob. | Pay Bob.
        Is it so? Right. Pay Bob. | Is it so? Pay Bob.
        Let me know if you need help. | Do you need help?
        Is it fine? OK. Pay Bob. | Is it fine? Pay Bob.
        When does the fair close? | What time does the fair close?
    """,
    "tense and form": """
        Alice will pay. | Alice paid.
        Alice may pay. | Alice must pay.
        It was open. | It is open.
        Alice should leave. | Alice could leave.
    """,
    "what is not understood": """
        \u6211\u6b20\u4f60 5 | \u4f60\u6b20\u6211 5
        Заплати Ивану | Заплати Марии
        The name is \u4f60. The cat is here. | The cat is here. The name is \u4f60.
        On Monday we say \u4f60 to it. | We say \u4f60 to it on Monday.
        Hello \u4f60\u597d | Hello \u4f60
        Ich zahle heute nicht | Ich zahle heute
        Wo ist der Hund und die Katze? | Wo ist die Katze und der Hund?
        Je ne paie pas la facture. | Je paie la facture.
        No pago la factura hoy. | Pago la factura hoy.
        Great \U0001f600 | Great \U0001f622
        He said "no" to it. | He said no to it.
    """,
}
SAME_IN_MEANING = {
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
    """,
}
"""The same to a reader, but by rules that fail in other sentences: refused as well."""


@pytest.mark.parametrize(
    ("kind", "donor", "recipient"), pairs(REFUSED) + pairs(SAME_IN_MEANING) + TRAPS
)
def test_another_fact_is_refused(kind: str, donor: str, recipient: str) -> None:
    assert donor != recipient
    assert differing(donor, recipient)
    assert differing(recipient, donor)


@pytest.mark.parametrize(("kind", "donor", "recipient"), pairs(REFUSED) + TRAPS)
def test_it_is_refused_amid_other_text_as_well(kind: str, donor: str, recipient: str) -> None:
    around = "The notice came on Monday. {} It was sent to every customer of the bank."
    assert differing(around.format(donor), around.format(recipient))


@pytest.mark.parametrize(
    ("donor", "recipient", "reason"),
    [
        ("It costs 5 euros.", "It costs 6 euros.", "'5' in the donor, '6' in the recipient"),
        ("It is open.", "It is not open.", "nothing in the donor, 'not ' in the recipient"),
        (
            "Bob paid Al.",
            "Al paid Bob.",
            "'Bob paid Al' in the donor, 'Al paid Bob' in the recipient",
        ),
        (
            "a",
            "b " * 40,
            "'a' in the donor, 'b b b b b b b b b b b b b b b b b b b...' in the recipient",
        ),
    ],
)
def test_the_reason_shows_what_differs(donor: str, recipient: str, reason: str) -> None:
    assert differing(donor, recipient) == f"texts differ: {reason}"
