"""The words of the invented world. All begin with a consonant, so "a" is always the right article."""


def _compounds(starts: str, ends: str) -> tuple[str, ...]:
    return tuple(start + end for start in starts.split() for end in ends.split())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _compounds("Bel Cor Dal Fen Gar Hal Jor Mar", "a in os wen ric")
LAST_NAMES = _compounds("Brack Dun Hart Kes Mill Pell Stan Thorn", "by den mor wick ward")
TOWNS = _compounds("Bram Cald Dorn Gild Kel Nor Sel Wex", "ford ham mere ton")
TRADES = _words(
    """
    baker barber brewer butcher carpenter cobbler cook cooper dyer farmer fisher gardener glazier goldsmith hatter
    hunter judge locksmith mason miller miner nurse painter potter roofer saddler sailor smith tailor tanner teacher
    weaver
    """
)
ANIMALS = _words(
    """
    badger bat bear beetle cat crow deer dog dove duck falcon ferret fox frog goat goose hare hawk hen horse lizard
    magpie mole mouse newt parrot pig pony rabbit raven sheep toad
    """
)
DISHES = _words(
    """
    barley beans bread broth cabbage carrots cheese cherries chestnuts cream dumplings figs grapes ham honeycake
    leeks lentils mushrooms mussels noodles pancakes parsnips pears plums porridge potatoes pudding rice salmon
    sausages trout turnips
    """
)
INSTRUMENTS = _words(
    """
    bagpipe banjo bassoon bell bugle cello clarinet cornet cymbal drum fiddle flute gong guitar harp horn kazoo lute
    lyre mandolin piano recorder rattle sitar tabor tambourine trombone trumpet tuba viola violin whistle
    """
)
MATERIALS = _words(
    """
    bamboo bone brass bronze canvas clay coal copper cork cotton flint glass gold granite horn lead leather linen
    marble paper pewter pine silk silver slate steel straw tin wax wool
    """
)
THINGS = _words(
    """
    basket bench bottle bowl box bridge bucket candlestick chain chair clock comb crown cup door fence flag gate
    kettle knife ladder lamp mask mirror pipe plate ring roof table wheel
    """
)
TOOLS = _words(
    """
    brush chisel clamp crowbar file gimlet glue hammer hook jack knot lathe loom mallet nail needle peg pin plane
    pliers punch ratchet rivet rope sander saw screw shears solder tongs torch vice
    """
)
CAUSES = _words(
    """
    dew dust fire fog frost hail lightning moonlight mud music pepper rain salt sand seawater smoke snow soap steam
    sunlight syrup thunder vinegar wind
    """
)
EFFECTS = _words(
    """
    bends blooms breaks bubbles burns cracks crumbles curls darkens dissolves fades floats freezes glows grows
    hardens hums melts peels rots rusts sags shines shrinks sings sinks softens splits stinks swells tears vanishes
    """
)
LUGGAGE = _words(
    """
    book broom button carpet coat coin cradle dagger feather hat jar key lantern letter map needle pan pillow purse
    rope scarf shovel spoon sword
    """
)
COLOURS = _words(
    """
    beige black blue brown crimson cyan gray green khaki lilac magenta maroon mauve navy pink purple red scarlet
    tan teal turquoise violet white yellow
    """
)
