"""Words that names are made of."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """
    amber ancient autumn bitter black blue bold brave bright broken calm clever cold crimson curious dark deep
    distant dry early eastern empty fading fast fierce frozen gentle golden grand green grey hidden hollow iron
    ivory late lazy little lone long lost lucky misty narrow noble northern old pale patient plain proud quick
    quiet rapid red restless rough royal rusty
    """
)

NOUNS = _words(
    """
    acorn anchor apple arrow badger barrel basin beacon bell birch bridge brook candle canyon castle cedar cellar
    chapel circle cliff cloud copper coral cottage crane creek crown desert dune eagle ember falcon feather fern
    field flame forest fountain fox garden gate glacier grove hammer harbor hawk heron hill island jungle kettle
    ladder lake lantern lark ledge lemon lily lion maple marble meadow mill mirror moon mountain nest oak ocean
    olive orchard otter owl palace pearl pebble pine planet pond prairie quarry raven reef ridge river robin rose
    saddle shadow spring
    """
)

VERBS = _words(
    """
    add bind build call check clear close copy count draw drop fetch fill find fold free grow hash hold join keep
    lead lift link load lock map mark match merge move note open pack parse pick plan poll push read send show
    sort split store swap sync test wrap
    """
)

CITIES = _words(
    """
    Accra Bergen Cairo Delhi Dublin Geneva Havana Jakarta Kyoto Lagos Lima Lisbon Madrid Malmo Manila Nairobi Oslo
    Porto Quito Riga Seoul Sofia Tunis Vienna
    """
)
