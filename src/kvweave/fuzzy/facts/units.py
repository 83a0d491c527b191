"""Units of measure and currencies, by every way they are commonly written.

A unit is part of its number: 5 km and 5000 m are two facts, although one length. What was asked in
one unit would be answered in it, and a cached number must not be taken for another.
"""

from __future__ import annotations

from kvweave.fuzzy.facts.wordlists import table

UNITS = table("""
kilogram: kg, kgs, KG, Kg, kilo, kilos, kilogram, kilograms, kilogramme, kilogrammes
gram: g, gram, grams, gramme, grammes
milligram: mg, milligram, milligrams
microgram: mcg, µg, μg, microgram, micrograms
tonne: tonne, tonnes
ton: ton, tons
pound: pound, pounds
lb: lb, lbs
ounce: oz, ounce, ounces
stone: stone, stones
kilometre: km, kms, KM, kilometre, kilometres, kilometer, kilometers
metre: metre, metres, meter, meters
centimetre: cm, cms, centimetre, centimetres, centimeter, centimeters
millimetre: mm, millimetre, millimetres, millimeter, millimeters
mile: mi, mile, miles
yard: yd, yds, yard, yards
foot: ft, foot, feet
inch: inch, inches
litre: l, L, litre, litres, liter, liters
millilitre: ml, mL, millilitre, millilitres, milliliter, milliliters
gallon: gal, gallon, gallons
pint: pt, pint, pints
second: s, sec, secs, second, seconds
millisecond: ms, millisecond, milliseconds
minute: min, mins, minute, minutes
hour: h, hr, hrs, hour, hours
day: day, days
week: wk, wks, week, weeks
month: mth, mths, month, months
year: yr, yrs, year, years
bit: bit, bits
byte: byte, bytes
kilobyte: KB, kB, kb, kilobyte, kilobytes
megabyte: MB, megabyte, megabytes
megabit: Mb, megabit, megabits
gigabyte: GB, gigabyte, gigabytes
gigabit: Gb, gigabit, gigabits
terabyte: TB, terabyte, terabytes
hertz: Hz, hertz
kilohertz: kHz, kilohertz
megahertz: MHz, megahertz
gigahertz: GHz, gigahertz
watt: W, watt, watts
kilowatt: kW, kilowatt, kilowatts
megawatt: MW, megawatt, megawatts
milliwatt: mW, milliwatt, milliwatts
kilowatt-hour: kWh
volt: V, volt, volts
ampere: amp, amps, ampere, amperes
celsius: C, celsius, centigrade
fahrenheit: F, fahrenheit
kelvin: K, kelvin, kelvins
kilocalorie: kcal, kilocalorie, kilocalories
calorie: cal, calorie, calories
joule: J, joule, joules
kilojoule: kJ, kilojoule, kilojoules
percent: %, percent
degree: °, degree, degrees
dollar: dollar, dollars
usd: USD, usd
gbp: GBP, gbp, quid
euro: EUR, eur, euro, euros
yen: JPY, jpy, yen
rupee: INR, inr, rupee, rupees
cent: cent, cents
pence: p, pence
""")
"""From a spelling, in its own capitals, to the unit. Pounds are £ or lb, and so neither."""

SCALE_SUFFIXES = {"k": "thousand", "K": "thousand", "bn": "billion"}
"""Letters right behind digits. 5m may be metres or a million, and stays an identifier."""

CURRENCY_SIGNS = table("""
dollar: $
usd: US$
gbp: £
euro: €
rupee: ₹
yen or yuan: ¥
aud: A$, AU$
cad: C$, CA$
nzd: NZ$
hkd: HK$
""")
