"""Questions of many kinds for a model to answer, so that a drafter learns from its own answers.

Owns word lists, templates and the draw among them. Everything was written for this project; nothing
comes from a benchmark. Knows no model: `Opening` is the start of a user's turn that a model goes on with.
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Question(NamedTuple):
    """A user's turn, complete."""

    text: str


class Opening(NamedTuple):
    """The first words of a user's turn; a model writes the rest. May be empty."""

    text: str


def _parts(text: str, between: str = "|") -> list[str]:
    return [part.strip() for part in text.replace("\n", "").split(between)]


_TOPICS = """volcanoes|the water cycle|honey bees|black holes|the Roman Empire|photosynthesis|jazz music|tea|
chess|coral reefs|electric cars|the French Revolution|vaccines|bridges|the stock market|sleep|
glaciers|bread baking|the printing press|migration of birds|solar panels|the immune system|
Shakespeare|earthquakes|coffee|the Moon landing|gravity|public libraries|inflation|the Silk Road|
mushrooms|wind turbines|the human heart|sailing|origami|dinosaurs|computer viruses|
the Great Wall of China|tides|chocolate|the Olympic Games|lightning|recycling|ancient Egypt|
machine learning|the Amazon rainforest|yoga|time zones|whales|the steam engine|democracy|
antibiotics|pottery|the periodic table|marathon running|deserts|the Renaissance|rainbows|cheese|
urban gardening|satellites|penguins|the Industrial Revolution|memory|supply and demand|bicycles|DNA|
the Great Depression|beekeeping|jet engines|climate change|the Cold War|opera|rice farming|fossils|
the violin|probability|the ozone layer|camels|encryption|lighthouses|the Vikings|nutrition|
film photography|tsunamis|the solar system|hibernation|insurance|the telephone|wolves|concrete|
the nervous system|folk tales|submarines|minimum wage|silk|the Black Death|batteries|tennis|
remote work|octopuses|the Suez Canal|calendars|mental health|the guitar|hurricanes|robots|olive oil|
the Aztecs"""
TOPICS = _parts(_TOPICS)
_NAMES = _parts(
    "Anna Ben Carla David Elena Farid Grace Hiro Ines Jamal Kofi Lena Marco Nadia Omar Priya Quentin Rosa "
    "Sven Tara Uma Viktor Wei Ximena Yusuf Zoe Tom Emily James Sarah Mary John",
    " ",
)
_THINGS = _parts(
    "apples books pencils tickets stamps eggs marbles cookies shirts bottles chairs lamps oranges boxes "
    "stickers flowers candles cups bags bricks",
    " ",
)
_PLACES = _parts("school office park market library station museum harbour farm hospital bakery stadium", " ")
_CODE = """reverses a string|checks whether a number is prime|merges two sorted lists|
counts the words in a file|finds the most common letter|computes the factorial of n|
flattens a nested list|removes duplicates from a list|validates an email address|
converts Celsius to Fahrenheit|sorts dictionaries by a key|computes Fibonacci numbers|
parses a CSV line|finds the longest common prefix|rotates a matrix|checks for balanced brackets|
implements binary search|groups anagrams|computes a moving average|finds the second largest value|
reads a JSON file and prints its keys|downloads a web page|generates a random password|
implements a stack|counts vowels|transposes a matrix|converts a number to Roman numerals|
finds all pairs that add up to a target"""
CODE = _parts(_CODE)
_LANGUAGES = ("Python", "JavaScript", "Java", "C++", "Python", "Python", "SQL", "Bash", "Rust", "Go")
_FORMS = _parts(
    "an email to a colleague|a short story for children|a poem|a blog post|a product description|a speech|"
    "a news article|a dialogue between two friends|a recipe|a cover letter|a review|a travel diary entry|"
    "an essay|a lesson plan|a list of ten facts|a letter to the editor|an advertisement|a limerick"
)
_ROLES = _parts(
    "a doctor|a history teacher|a travel guide|a software engineer|a chef|a lawyer|a stand-up comedian|"
    "a financial adviser|a physicist|a gardener|a detective|a football coach|a librarian|a philosopher"
)
_FEELINGS = _parts("happy worried proud tired curious nervous hopeful bored grateful surprised", " ")

# (German, French, Spanish, English) stretches that join into sentences.
_SUBJECTS = (
    "Die Regierung|Le gouvernement|El gobierno|The government",
    "Meine Schwester|Ma sœur|Mi hermana|My sister",
    "Der junge Arzt|Le jeune médecin|El joven médico|The young doctor",
    "Die Schüler|Les élèves|Los alumnos|The pupils",
    "Unser Nachbar|Notre voisin|Nuestro vecino|Our neighbour",
    "Das Unternehmen|L'entreprise|La empresa|The company",
    "Der Minister|Le ministre|El ministro|The minister",
    "Viele Menschen|Beaucoup de gens|Muchas personas|Many people",
    "Die Polizei|La police|La policía|The police",
    "Der Präsident|Le président|El presidente|The president",
    "Eine alte Frau|Une vieille femme|Una mujer mayor|An old woman",
    "Die Forscher|Les chercheurs|Los investigadores|The researchers",
)
_WHEN = (
    "gestern|hier|ayer|yesterday",
    "am Montag|lundi|el lunes|on Monday",
    "nach dem Treffen|après la réunion|después de la reunión|after the meeting",
    "im vergangenen Jahr|l'année dernière|el año pasado|last year",
    "trotz des Regens|malgré la pluie|a pesar de la lluvia|despite the rain",
    "zum ersten Mal|pour la première fois|por primera vez|for the first time",
    "in Berlin|à Berlin|en Berlín|in Berlin",
    "ohne zu zögern|sans hésiter|sin dudar|without hesitating",
)
_DONE = (
    "hat {w} ein neues Haus gekauft|a acheté {w} une nouvelle maison|compró {w} una casa "
    "nueva|bought a new house {w}",
    "hat {w} über die Preise gesprochen|a parlé {w} des prix|habló {w} de los precios|spoke about "
    "the prices {w}",
    "hat {w} die alte Brücke besucht|a visité {w} le vieux pont|visitó {w} el puente viejo|visited "
    "the old bridge {w}",
    "hat {w} eine wichtige Entscheidung getroffen|a pris {w} une décision importante|"
    "tomó {w} una decisión importante|made an important decision {w}",
    "hat {w} den letzten Zug verpasst|a manqué {w} le dernier train|perdió {w} el último tren|missed "
    "the last train {w}",
    "hat {w} den Vertrag unterschrieben|a signé {w} le contrat|firmó {w} el contrato|signed the contract {w}",
    "hat {w} mehr Geld verlangt|a demandé {w} plus d'argent|pidió {w} más dinero|asked for more money {w}",
    "hat {w} vor den Folgen gewarnt|a averti {w} des conséquences|advirtió {w} de las consecuencias|"
    "warned of the consequences {w}",
)
_TONGUES = ("German", "French", "Spanish", "English")

_STARTERS = _parts(
    "What|How|Why|Who was|When did|Where|Can you|Could you please|Explain|Write|Write a Python|Translate|"
    "Summarize|"
    "Summarize the following|Solve|A train|If|Calculate|List|Give me|Describe|Imagine|Compare|What is the|"
    "What are the|How do I|I want to|I need|Tell me|Help me|Create|Design|Rewrite|Classify|Extract|Given|"
    "You are|In the|The following|Here is|Read the|Based on the|Identify|Discuss|Analyze|Hi|Hello|Let|Find|"
    "Suppose|Is it|Do|Which|Name|Compose|Draft|Generate|Provide|Suggest|Develop|Evaluate|My"
)


def draw(rng: random.Random) -> Question | Opening:
    """One of them: half are openings, half are questions of a template."""
    if rng.random() < 0.5:
        return Opening(rng.choice(_STARTERS) if rng.random() < 0.7 else "")
    kinds = (_ask, _ask, _maths, _maths, _translate, _code, _write, _play, _choose)
    return Question(rng.choice(kinds)(rng))


def follow_up(rng: random.Random, text: str) -> Question:
    """A question about `text`, which is a passage of some sentences."""
    topic = rng.choice(TOPICS)
    return Question(
        rng.choice(
            (
                f"Summarize the following text:\n\n{text}",
                f"Write a short summary of this article.\n\n{text}\n\nSummary:",
                f"{text}\n\nWhat are the main points of the text above?",
                f"{text}\n\nTL;DR",
                f"Use the passage to answer the question.\n\nPassage: {text}\n\nQuestion: What does it say "
                "about the most important reason?\nAnswer:",
                f"Context:\n[1] {text}\n[2] {_sentences(rng)}\n\nUsing only the context, tell me what it is "
                f"about.",
                f"Documents:\n\n1. {_sentences(rng)}\n2. {text}\n\nQuestion: how is this related to {topic}?",
                f"Rewrite this text in simpler words:\n{text}",
                f"Turn this into a list of bullet points:\n\n{text}",
                f"Correct the mistakes in this text, if there are any:\n{text}",
                f"Give this text a title and three keywords.\n\n{text}",
                f"Answer from the text below: who or what is it about, and what happens?\n\n{text}",
            )
        )
    )


def again(rng: random.Random) -> Question:
    """A next turn of a conversation."""
    return Question(
        rng.choice(
            (
                "Can you give me an example?",
                "Please make it shorter.",
                "Explain it as if I were ten years old.",
                "Rewrite your answer as a list.",
                "Why is that?",
                "What are the disadvantages?",
                "Now write the same in a formal tone.",
                "Are you sure? Check your answer step by step.",
                "What should I do next?",
                "Tell me more about the second point.",
                "Start every sentence of your answer with the letter A.",
                f"And how does that compare with {rng.choice(TOPICS)}?",
            )
        )
    )


def _ask(rng: random.Random) -> str:
    topic, other = rng.sample(TOPICS, 2)
    return rng.choice(
        (
            f"What is the history of {topic}?",
            f"Explain {topic} in simple words.",
            f"What are the advantages and disadvantages of {topic}?",
            f"Why does {topic} matter today?",
            f"How would you explain the connection between {topic} and {other}?",
            f"Give me five interesting facts about {topic}.",
            f"Compare {topic} with {other}.",
            f"Who is the most important person in the history of {topic}?",
            f"where does the word for {topic} come from",
            f"when was {topic} first described",
            f"who discovered the truth about {topic}",
            f"What do beginners get wrong about {topic}, and how can they avoid it?",
            f"Name three books about {topic} and say what each is about.",
        )
    )


def _maths(rng: random.Random) -> str:
    who, friend = rng.sample(_NAMES, 2)
    what, where = rng.choice(_THINGS), rng.choice(_PLACES)
    a, b, c, d = (rng.randint(2, 60) for _ in range(4))
    return rng.choice(
        (
            f"{who} has {a + b} {what}. {friend} takes {b} of them and then buys {c} more. How many {what} "
            "do they have together?",
            f"A {where} sells {what} for ${a} each. {who} buys {c} of them and pays with ${a * c + d}. How "
            f"much "
            "change is there?",
            f"{who} walks {a} km to the {where} every day for {b} days, {friend} walks half as far. How far "
            f"do both "
            "walk in total?",
            f"Solve for x: {a}x + {b} = {a * c + b}.",
            f"What is {a} * {b} + {c}? Show your steps.",
            f"{who} reads {a} pages a day. A book has {a * b} pages. How many days does it take, and how "
            f"many if {who} reads {c % 5 + 2} pages more each day?",
            f"There are {a * 3} {what} in a box. A third of them are red, {b % 3 + 2} are blue and the rest "
            f"are "
            "green. How many are green?",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"{who} earns ${a} per hour and works {b} hours a week. After paying ${c} for rent each week, "
            f"how much is left after {d % 9 + 2} weeks?",
            f"If {a} {what} cost ${a * c}, how much do {b} {what} cost? Think step by step.",
            f"The temperature was {a} degrees at noon and fell by {c % 7 + 1} degrees every hour. What was "
            f"it after {d % 8 + 1} hours?",
            f"What is {a}% of {b * 10}?",
        )
    )


def _sentence(rng: random.Random) -> list[str]:
    """The same in German, French, Spanish and English."""
    subject, when, done = (rng.choice(part).split("|") for part in (_SUBJECTS, _WHEN, _DONE))
    return [f"{s} {d.format(w=w)}." for s, w, d in zip(subject, when, done, strict=True)]


def _sentences(rng: random.Random, language: int = 3) -> str:
    return " ".join(_sentence(rng)[language] for _ in range(rng.randint(1, 3)))


def _translate(rng: random.Random) -> str:
    language, other = rng.sample(range(4), 2)
    if rng.random() < 0.5:
        language, other = 0, 3
    text, to, of = _sentences(rng, language), _TONGUES[other], _TONGUES[language]
    return rng.choice(
        (
            f"Translate {of} to {to}: {text}",
            f"Translate the following {of} text into {to}.\n\n{text}",
            f"{text}\n\nWhat does this mean in {to}?",
            f"Please translate into {to}: {text}",
        )
    )


def _code(rng: random.Random) -> str:
    task, language = rng.choice(CODE), rng.choice(_LANGUAGES)
    return rng.choice(
        (
            f"Write a {language} function that {task}.",
            f"Write a {language} program that {task}, and explain how it works.",
            f"How do I write {language} code that {task}? Include a test.",
            f"Complete this function:\n\ndef solve(x):\n    # {task}\n",
            f"My {language} code that {task} is too slow. How can I make it faster?",
        )
    )


def _write(rng: random.Random) -> str:
    topic, form, feeling = rng.choice(TOPICS), rng.choice(_FORMS), rng.choice(_FEELINGS)
    return rng.choice(
        (
            f"Write {form} about {topic}.",
            f"Write {form} about {topic}. It should sound {feeling} and have about {rng.randint(5, 25) * 10} "
            f"words.",
            f"Help me to write {form}. I am {feeling} because of {topic}.",
            f"Write {form} for {rng.choice(_NAMES)}, who works at the {rng.choice(_PLACES)} and loves "
            f"{topic}.",
        )
    )


def _play(rng: random.Random) -> str:
    role, topic, who = rng.choice(_ROLES), rng.choice(TOPICS), rng.choice(_NAMES)
    return rng.choice(
        (
            f"You are {role}. {who} asks you about {topic}. What do you say?",
            f"Pretend to be {role} and tell me what you think of {topic}.",
            f"I feel {rng.choice(_FEELINGS)} today. As {role}, what would you advise me?",
            f"Plan a weekend for {who}, who likes {topic} and does not want to spend more than "
            f"${rng.randint(2, 40) * 10}.",
        )
    )


def _choose(rng: random.Random) -> str:
    words = rng.sample([*_THINGS, *_PLACES, *_FEELINGS], 6)
    return rng.choice(
        (
            f"Sort these words alphabetically: {', '.join(words)}.",
            f"Which of these does not belong: {', '.join(words[:4])}? Explain.",
            f"Use each of these words in a sentence: {', '.join(words[:3])}.",
            f'Is this review positive or negative? "The {words[0]} made me {rng.choice(_FEELINGS)}, but the '
            f"service "
            'was slow."',
            f"Extract all names and places: {_sentences(rng)} {rng.choice(_NAMES)} went to the {words[1]}.",
            f"Make a table of {words[0]}, {words[1]} and {words[2]} with their uses.",
        )
    )
