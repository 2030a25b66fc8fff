"""Word lists of the synthetic tasks: short, common English words and first names."""

NOUNS: tuple[str, ...] = tuple(
    """apple pear plum grape lemon peach melon cherry banana orange bread cheese milk water juice coffee sugar salt
    rice soup cake egg meat fish bird cat dog horse cow pig sheep goat duck hen fox wolf bear lion tiger mouse
    rabbit frog snake bee ant spider tree leaf flower grass seed root river lake sea sand stone hill mountain
    valley forest field road bridge house door window wall roof floor room table chair bed lamp clock mirror box
    bag cup plate bowl spoon fork knife pot book page pen pencil paper letter map key coin ring shirt shoe hat
    coat glove sock button wheel car bus train boat ship plane bike engine star moon sun cloud rain snow wind
    storm fire ice hand foot arm leg head eye ear nose mouth heart king queen doctor teacher farmer baker sailor
    child friend city town village school shop market garden park farm music song drum bell ball kite doll game
    hammer nail rope tent torch wood iron gold silver glass silk wool night day morning summer winter""".split()
)

ADJECTIVES: tuple[str, ...] = tuple(
    """red blue green yellow black white brown pink purple gray big small tall short long old new young hot cold
    warm dry wet fast slow loud quiet soft hard light dark heavy clean empty full happy sad kind brave""".split()
)

VERBS: tuple[str, ...] = tuple(
    """walks runs sleeps eats sings waits jumps looks smiles works plays reads writes talks listens moves stops
    turns falls climbs swims flies shines grows stands sits""".split()
)

NAMES: tuple[str, ...] = tuple(
    """Anna Ben Carl Dora Emma Fred Grace Hugo Ida Jack Kate Leo Mary Noah Olga Paul Ruth Sam Tina Tom Uma Vera
    Will Zoe Alice Bob David Eva Frank Helen Ivan Julia Kim Laura Max Nina Oscar Peter Rosa Simon""".split()
)

COLOURS: tuple[str, ...] = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "pink",
    "purple",
    "orange",
)
LETTERS: str = "abcdefghijklmnopqrstuvwxyz"
IRREGULAR = {
    "sheep": "sheep", "fish": "fish", "mouse": "mice", "foot": "feet", "child": "children",
    "knife": "knives", "leaf": "leaves", "wolf": "wolves",
}  # fmt: skip


def plural(noun: str) -> str:
    """Return the plural of a noun of `NOUNS`."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
