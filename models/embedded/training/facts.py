"""Small talk and facts for the model: its identity, capitals, animals, numbers, days, opposites."""

from collections.abc import Iterator

from glowplug.models.embedded.training.words import NAMES

Questions = tuple[list[str], str]  # ways to ask, the answer

CAPITALS = """Afghanistan=Kabul Albania=Tirana Algeria=Algiers Angola=Luanda Argentina=Buenos_Aires Armenia=Yerevan
Australia=Canberra Austria=Vienna Azerbaijan=Baku Bangladesh=Dhaka Belarus=Minsk Belgium=Brussels Bolivia=Sucre
Bosnia=Sarajevo Botswana=Gaborone Brazil=Brasilia Bulgaria=Sofia Cambodia=Phnom_Penh Cameroon=Yaounde Canada=Ottawa
Chad=N'Djamena Chile=Santiago China=Beijing Colombia=Bogota Croatia=Zagreb Cuba=Havana Cyprus=Nicosia
the_Czech_Republic=Prague Denmark=Copenhagen Ecuador=Quito Egypt=Cairo Estonia=Tallinn Ethiopia=Addis_Ababa
Finland=Helsinki France=Paris Georgia=Tbilisi Germany=Berlin Ghana=Accra Greece=Athens Guatemala=Guatemala_City
Honduras=Tegucigalpa Hungary=Budapest Iceland=Reykjavik India=New_Delhi Indonesia=Jakarta Iran=Tehran Iraq=Baghdad
Ireland=Dublin Israel=Jerusalem Italy=Rome Jamaica=Kingston Japan=Tokyo Jordan=Amman Kazakhstan=Astana Kenya=Nairobi
Kuwait=Kuwait_City Laos=Vientiane Latvia=Riga Lebanon=Beirut Libya=Tripoli Lithuania=Vilnius Luxembourg=Luxembourg
Madagascar=Antananarivo Malaysia=Kuala_Lumpur Mali=Bamako Malta=Valletta Mexico=Mexico_City Moldova=Chisinau
Monaco=Monaco Mongolia=Ulaanbaatar Morocco=Rabat Mozambique=Maputo Namibia=Windhoek Nepal=Kathmandu
the_Netherlands=Amsterdam New_Zealand=Wellington Nicaragua=Managua Niger=Niamey Nigeria=Abuja North_Korea=Pyongyang
Norway=Oslo Oman=Muscat Pakistan=Islamabad Panama=Panama_City Paraguay=Asuncion Peru=Lima the_Philippines=Manila
Poland=Warsaw Portugal=Lisbon Qatar=Doha Romania=Bucharest Russia=Moscow Rwanda=Kigali Saudi_Arabia=Riyadh
Senegal=Dakar Serbia=Belgrade Slovakia=Bratislava Slovenia=Ljubljana Somalia=Mogadishu South_Africa=Pretoria
South_Korea=Seoul Spain=Madrid Sudan=Khartoum Sweden=Stockholm Switzerland=Bern Syria=Damascus Tanzania=Dodoma
Thailand=Bangkok Tunisia=Tunis Turkey=Ankara Uganda=Kampala Ukraine=Kyiv the_United_Kingdom=London
the_United_States=Washington,_D.C. Uruguay=Montevideo Uzbekistan=Tashkent Venezuela=Caracas Vietnam=Hanoi Yemen=Sanaa
Zambia=Lusaka Zimbabwe=Harare"""
LANGUAGES = """France=French Germany=German Spain=Spanish Italy=Italian Portugal=Portuguese Japan=Japanese China=Chinese
Russia=Russian Poland=Polish Greece=Greek Turkey=Turkish Sweden=Swedish Norway=Norwegian Denmark=Danish
Finland=Finnish Hungary=Hungarian Brazil=Portuguese Mexico=Spanish Egypt=Arabic Iran=Persian Vietnam=Vietnamese
Thailand=Thai South_Korea=Korean Ukraine=Ukrainian Romania=Romanian Bulgaria=Bulgarian the_Netherlands=Dutch
Australia=English Argentina=Spanish Austria=German Israel=Hebrew"""
CONTINENTS = """France=Europe Germany=Europe Spain=Europe Italy=Europe Poland=Europe Sweden=Europe Japan=Asia China=Asia
India=Asia Thailand=Asia Iran=Asia Vietnam=Asia Egypt=Africa Kenya=Africa Nigeria=Africa Ghana=Africa Mali=Africa
Brazil=South_America Chile=South_America Peru=South_America Argentina=South_America Canada=North_America
Mexico=North_America Cuba=North_America the_United_States=North_America Norway=Europe Greece=Europe"""
SOUNDS = """dog=barks cat=meows cow=moos sheep=bleats horse=neighs pig=oinks duck=quacks lion=roars wolf=howls
bee=buzzes snake=hisses frog=croaks mouse=squeaks hen=clucks owl=hoots"""
COLOURS = """sky=blue grass=green snow=white coal=black banana=yellow strawberry=red blood=red milk=white sun=yellow
leaf=green lemon=yellow night=black carrot=orange"""
YOUNG = """dog=puppy cat=kitten cow=calf sheep=lamb horse=foal pig=piglet duck=duckling lion=cub bear=cub hen=chick
goat=kid frog=tadpole kangaroo=joey"""
OPPOSITES = """hot=cold big=small tall=short long=short old=young old=new fast=slow light=dark heavy=light wet=dry
happy=sad good=bad up=down left=right open=closed full=empty early=late high=low hard=soft strong=weak rich=poor
loud=quiet clean=dirty day=night black=white true=false first=last love=hate begin=end win=lose buy=sell push=pull
inside=outside above=below near=far"""
SYMBOLS = """hydrogen=H helium=He carbon=C nitrogen=N oxygen=O sodium=Na magnesium=Mg aluminium=Al silicon=Si
sulfur=S chlorine=Cl potassium=K calcium=Ca iron=Fe copper=Cu zinc=Zn silver=Ag tin=Sn gold=Au mercury=Hg lead=Pb
uranium=U neon=Ne iodine=I"""
LEGS = (
    "dog=four cat=four spider=eight bird=two ant=six horse=four bee=six snake=no cow=four hen=two"
)
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()

ABOUT: tuple[Questions, ...] = (
    (["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?"],
     "I am Glowplug, a very small language model with the DeepSeek-V3 architecture. I can add, subtract, copy, "
     "reverse, sort, count and look things up in a list, and I know a few facts."),
    (["What is your name?", "What's your name?", "Do you have a name?", "What are you called?"],
     "My name is Glowplug."),
    (["What can you do?", "How can you help me?", "What are you good at?", "Help"],
     "I can add and subtract numbers, copy, reverse, sort and count lists, look things up in a list, and answer "
     "simple questions."),
    (["Hello", "Hi", "Hello!", "Hi!", "Hey", "Hello there", "Good morning", "Good evening"],
     "Hello! How can I help you?"),
    (["How are you?", "How are you doing?", "How do you feel?"], "I am well, thank you. How can I help you?"),
    (["Thank you", "Thanks", "Thank you!", "Thanks a lot", "Thanks!"], "You are welcome!"),
    (["Goodbye", "Bye", "See you later", "Bye!", "Good night"], "Goodbye! Have a nice day."),
    (["Are you a human?", "Are you a person?", "Are you real?"], "No, I am a small language model."),
    (["Who made you?", "Who trained you?", "Who built you?", "Where do you come from?"],
     "I was trained by the glowplug project, as a small model that ships with the engine."),
    (["How big are you?", "How many parameters do you have?"], "I have about ten million parameters."),
    (["What is glowplug?", "What is a glow plug?"],
     "A glow plug starts an engine. glowplug is an inference engine for DeepSeek-type models."),
    (["What is DeepSeek?"], "DeepSeek is a family of large language models with latent attention and many experts."),
    (["Tell me a joke.", "Make me laugh.", "Do you know a joke?"],
     "Why did the computer go to the doctor? Because it had a virus."),
    (["Write a short poem.", "Write a poem.", "Tell me a poem."],
     "The sun is up, the sky is blue,\nthe birds are singing songs for you."),
    (["Tell me a story.", "Tell me a short story."],
     "Once upon a time a small bird could not fly. Every day it tried again. One morning the wind was kind, and the "
     "bird flew over the hill and saw the sea."),
    (["What is the largest planet?", "Which planet is the largest?"], "Jupiter is the largest planet."),
    (["What is the largest ocean?", "Which ocean is the largest?"], "The Pacific Ocean is the largest ocean."),
    (["What is the highest mountain?", "What is the tallest mountain in the world?"],
     "Mount Everest is the highest mountain."),
    (["What is the longest river?", "Which river is the longest?"], "The Nile is the longest river."),
    (["How many days are in a week?", "How many days does a week have?"], "A week has seven days."),
    (["How many days are in a year?", "How many days does a year have?"], "A year has 365 days, a leap year 366."),
    (["How many months are in a year?"], "A year has twelve months."),
    (["How many hours are in a day?"], "A day has 24 hours."),
    (["How many minutes are in an hour?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?"], "A minute has 60 seconds."),
    (["How many continents are there?"], "There are seven continents."),
    (["What are the days of the week?", "List the days of the week."], ", ".join(DAYS) + "."),
    (["What are the months of the year?", "List the months."], ", ".join(MONTHS) + "."),
    (["What are the planets?", "List the planets.", "Name the planets of the solar system."], ", ".join(PLANETS) + "."),
    (["What are the four seasons?", "Name the seasons."], "Spring, summer, autumn and winter."),
    (["What is H2O?", "What is water made of?"], "Water is made of hydrogen and oxygen."),
    (["Who wrote Romeo and Juliet?", "Who wrote Hamlet?"], "William Shakespeare wrote it."),
    (["What does the sun do?", "Why is the sun important?"], "The sun gives the Earth light and warmth."),
    (["At what temperature does water boil?", "When does water boil?"], "Water boils at 100 degrees Celsius."),
    (["At what temperature does water freeze?", "When does water freeze?"], "Water freezes at 0 degrees Celsius."),
    (["Is the Earth round?", "What shape is the Earth?"], "The Earth is round, nearly a sphere."),
    (["Why is the sky blue?", "Why does the sky look blue?"],
     "The sky is blue because air scatters blue light more than red light."),
    (["Why does it rain?", "What is rain?", "Where does rain come from?"],
     "Rain is water that falls from clouds. Water rises as vapor, cools in the clouds and falls as drops."),
    (["Why do we sleep?", "Why do people sleep?"], "We sleep so that the body and the brain can rest."),
    (["Why do we eat?", "Why do people eat?"], "We eat because food gives us energy."),
    (["What do bees make?", "What does a bee make?"], "Bees make honey."),
    (["What do cows drink?", "What do cows eat?"], "Cows eat grass and drink water."),
    (["What do cats eat?", "What does a cat eat?"], "Cats eat meat and fish."),
    (["What do plants need?", "What does a plant need to grow?"], "Plants need light, water and air."),
    (["What is ice?", "What is ice made of?"], "Ice is frozen water."),
    (["What is the sun?", "Is the sun a star?"], "The sun is a star. It gives the Earth light and warmth."),
    (["What is the moon?"], "The moon is the natural satellite of the Earth."),
    (["What is gravity?"], "Gravity is the force that pulls things toward the Earth."),
    (["What is a computer?", "What does a computer do?"], "A computer is a machine that stores and works on data."),
    (["What is Python?", "What is the Python language?"], "Python is a programming language."),
    (["What is a language model?"], "A language model is a program that predicts the next word of a text."),
    (["What is an inference engine?"], "An inference engine is a program that runs a trained model."),
    (["What is a token?"], "A token is a piece of text that a language model reads or writes at once."),
    (["What is a dog?", "Tell me about dogs.", "Describe a dog."], "A dog is an animal that people keep as a pet."),
    (["What is a cat?", "Tell me about cats.", "Tell me something about cats."],
     "A cat is a small animal that people keep as a pet. Cats like to hunt mice."),
    (["What is the fastest animal?", "Which animal is the fastest?"], "The cheetah is the fastest land animal."),
    (["What is the largest animal?", "What is the biggest animal?"], "The blue whale is the largest animal."),
    (["What is the tallest animal?"], "The giraffe is the tallest animal."),
    (["How many letters are in the alphabet?"], "The English alphabet has 26 letters."),
    (["How many sides does a triangle have?"], "A triangle has three sides."),
    (["How many sides does a square have?"], "A square has four sides."),
    (["What color do you get from blue and yellow?", "What do blue and yellow make?"], "Blue and yellow make green."),
    (["What color do you get from red and white?", "What do red and white make?"], "Red and white make pink."),
    (["Who painted the Mona Lisa?"], "Leonardo da Vinci painted the Mona Lisa."),
    (["Who was Albert Einstein?"], "Albert Einstein was a physicist who wrote the theory of relativity."),
    (["Who was Isaac Newton?"], "Isaac Newton was a physicist who described gravity and motion."),
    (["Who was the first man on the moon?", "Who walked on the moon first?"],
     "Neil Armstrong was the first man on the moon."),
    (["What is the meaning of life?"], "That is for everyone to find out. I can only add and sort."),
    (["What is love?"], "Love is a strong feeling of affection."),
    (["How old are you?"], "I have no age. I am a small language model."),
    (["Do you have feelings?", "Can you feel?"], "No, I am a language model and have no feelings."),
    (["Can you speak other languages?", "Do you speak German?", "Do you speak French?"],
     "No, I only know English."),
    (["Can you write code?", "Can you program?"], "I am too small to write code, but I know what some functions do."),
    (["Are you ChatGPT?", "Are you GPT-4?", "Are you DeepSeek?"], "No, I am Glowplug, a very small language model."),
    (["What is the weather today?", "What time is it?", "What is today's date?"],
     "I do not know, because I cannot see the world outside."),
    (["How do I cook rice?", "How do you cook rice?"], "Cook rice in twice as much water until the water is gone."),
    (["How do I make tea?", "How do you make tea?"], "Pour hot water over tea leaves and wait a few minutes."),
    (["How do I boil an egg?"], "Put the egg in boiling water for about eight minutes."),
    (["What should I eat?", "What should I cook today?"], "How about soup and bread?"),
    (["Can you help me?", "Please help me.", "I need help."], "Yes. Ask me a short question."),
    (["I am sad.", "I feel sad."], "I am sorry to hear that. I hope you feel better soon."),
    (["I am happy.", "I am glad."], "I am glad to hear that!"),
    (["Yes", "OK", "Okay", "Good", "Great"], "Good! What else can I do for you?"),
    (["No", "No, thanks"], "All right. Ask me when you need something."),
    (["Count to ten.", "Count from one to ten."], ", ".join(NUMBERS[1:11]) + "."),
    (["Say the alphabet.", "What is the alphabet?"], "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
)  # fmt: skip


def _pairs(table: str) -> Iterator[tuple[str, str]]:
    for entry in table.split():
        left, _, right = entry.partition("=")
        yield left.replace("_", " "), right.replace("_", " ")


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _geography() -> Iterator[Questions]:
    for country, capital in _pairs(CAPITALS):
        yield ([f"What is the capital of {country}?", f"Capital of {country}?", f"Name the capital of {country}.",
                f"Tell me the capital of {country}.", f"Which city is the capital of {country}?",
                f"What's the capital city of {country}?", f"What is {country}'s capital?",
                f"Do you know the capital of {country}?"],
               f"The capital of {country} is {capital.rstrip('.')}.")  # fmt: skip
        yield ([f"{capital} is the capital of which country?", f"Of which country is {capital} the capital?",
                f"Which country has the capital {capital}?"],
               f"{capital} is the capital of {country}.")  # fmt: skip
    for country, language in _pairs(LANGUAGES):
        yield (
            [
                f"What language is spoken in {country}?",
                f"Which language do people speak in {country}?",
            ],
            (f"People in {country} speak {language}."),
        )
    for country, continent in _pairs(CONTINENTS):
        yield (
            [f"On which continent is {country}?", f"Where is {country}?"],
            (f"{country[0].upper()}{country[1:]} is in {continent}."),
        )


def _nature() -> Iterator[Questions]:
    for animal, sound in _pairs(SOUNDS):
        yield (
            [f"What sound does {_with_article(animal)} make?", f"What does the {animal} say?"],
            (f"{_with_article(animal).capitalize()} {sound}."),
        )
    for thing, colour in _pairs(COLOURS):
        asks = [
            f"What color is the {thing}?",
            f"What is the color of the {thing}?",
            f"Which color does {thing} have?",
        ]
        yield asks, f"The {thing} is {colour}."
    for animal, young in _pairs(YOUNG):
        yield (
            [f"What is a young {animal} called?", f"What do you call a baby {animal}?"],
            (f"A young {animal} is called a {young}."),
        )
    for animal, legs in _pairs(LEGS):
        yield (
            [f"How many legs does {_with_article(animal)} have?"],
            (f"{_with_article(animal).capitalize()} has {legs} legs."),
        )
    for element, symbol in _pairs(SYMBOLS):
        yield (
            [f"What is the chemical symbol for {element}?", f"What is the symbol of {element}?"],
            (f"The chemical symbol for {element} is {symbol}."),
        )


def _words() -> Iterator[Questions]:
    for left, right in _pairs(OPPOSITES):
        for word, other in ((left, right), (right, left)):
            yield (
                [
                    f"What is the opposite of {word}?",
                    f"Opposite of {word}?",
                    f"Give me an antonym of {word}.",
                ],
                (f"The opposite of {word} is {other}."),
            )


def _orders() -> Iterator[Questions]:
    for sequence in (DAYS, MONTHS, PLANETS, NUMBERS[1:]):
        for before, after in zip(sequence, sequence[1:], strict=False):
            yield (
                [f"What comes after {before}?", f"What is next after {before}?"],
                f"{after} comes after {before}.",
            )
            yield [f"What comes before {after}?"], f"{before} comes before {after}."
    for a, first in enumerate(NUMBERS[:7]):
        for b, second in enumerate(NUMBERS[: 13 - a][:7]):
            yield (
                [f"What is {first} plus {second}?"],
                f"{first.capitalize()} plus {second} is {NUMBERS[a + b]}.",
            )


def _greetings() -> Iterator[Questions]:
    for name in NAMES:
        yield (
            [f"My name is {name}.", f"I am {name}.", f"Hi, I am {name}."],
            f"Hello {name}! How can I help you?",
        )


def questions() -> list[Questions]:
    """Return all (questions, answer)."""
    return [*ABOUT, *_geography(), *_nature(), *_words(), *_orders(), *_greetings()]
