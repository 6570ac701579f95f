"""Words of the built-in prose, and the split that keeps training text and probes apart.

Every list is cut in two by `split_words`: the indexer of the reference build is trained on `train`, the campaigns ask in
`heldout`. No word here holds a digit, and none is a value word (`values.py`) or an entity name, so no filler sentence can
contain, contradict or overwrite a planted value.
"""

from typing import Literal

Split = Literal["train", "heldout", "all"]

PLACES = (
    "harbour bakery orchard library workshop station market valley museum kitchen garden theatre bridge farmhouse "
    "lighthouse classroom clinic meadow terrace courtyard vineyard warehouse laboratory gallery allotment boathouse "
    "cathedral canteen greenhouse observatory playground quarry ranch stable tavern village waterfront archive arcade "
    "ballroom bookshop campsite cottage dairy embassy ferry foundry gymnasium hillside inn junction lagoon mill nursery "
    "office pavilion quay reservoir sawmill school tearoom watermill yard"
).split()
THINGS = (
    "kettle ladder notebook lantern basket curtain blanket carpet mirror wheelbarrow teapot umbrella suitcase camera "
    "violin telescope compass saddle anchor bicycle bucket candle chimney clock cupboard desk drawer engine fence "
    "fountain guitar hammock hedge helmet jacket jug loom mattress menu newspaper oven painting parcel piano pillow plate "
    "poster pump quilt radio rope sail saucepan scarf shelf shovel sofa spade staircase stove table tent tray trolley vase "
    "wagon wardrobe whistle window"
).split()
PEOPLE = (
    "baker captain carpenter gardener librarian teacher painter farmer nurse plumber tailor cook driver engineer editor "
    "shepherd fisherman florist conductor curator dentist electrician firefighter geologist historian juggler keeper "
    "lawyer mechanic musician neighbour optician pharmacist porter potter printer ranger sailor sculptor singer surveyor "
    "translator traveller volunteer waiter weaver beekeeper architect astronomer botanist"
).split()
ADJECTIVES = (
    "old quiet narrow bright wooden heavy gentle careful patient cheerful dusty broken famous hidden muddy painted polished "
    "rusty simple sturdy tidy warm weathered yellow round plain modest handsome faded elegant curious crowded cosy clever "
    "borrowed awkward ancient busy calm damp empty fragile generous idle jolly kind lively mild neat odd pale rare "
    "shallow steep tall uneven vivid wide young"
).split()
ACTIONS = (
    "repaired painted carried borrowed cleaned found measured photographed polished replaced sketched sold tested "
    "unpacked washed wrapped admired described examined inspected lifted moved noticed ordered packed praised sorted "
    "studied decorated delivered donated emptied fetched finished followed guarded hid improved joined labelled mended "
    "opened planned rescued restored rebuilt shared stored tidied traded trimmed weighed"
).split()
ADVERBS = (
    "slowly carefully quietly gladly twice again together yesterday eagerly gently patiently proudly quickly rarely "
    "seldom simply steadily suddenly tenderly thoroughly usually willingly almost bravely calmly cheerfully finally "
    "happily neatly often"
).split()
SUBJECTS = (
    "weather baking gardening sailing history music painting cooking travel astronomy carpentry poetry cycling pottery "
    "geology architecture beekeeping photography theatre farming weaving hiking swimming chess botany printing fishing "
    "knitting railways languages furniture cheese bread tea rivers mountains islands gardens bridges clouds birds insects "
    "forests deserts tides harvests festivals markets lighthouses calligraphy"
).split()
MATERIALS = (
    "oak brass linen clay glass wool copper leather marble paper bamboo stone canvas cotton iron silk slate straw tin velvet "
    "willow wax porcelain plaster pine"
).split()
TIMES = (
    "in the morning|after lunch|before dawn|late in the evening|during the winter|in early spring|on a rainy afternoon|"
    "at the end of summer|just before sunset|over the holidays|around noon|in the middle of autumn|after the storm|"
    "on market day|during the long drought|when the fog lifted|as the bells rang|while the rain fell|"
    "once the guests had left|long before the railway came|at low tide|on the first cold night"
).split("|")
FEELINGS = (
    "delighted puzzled relieved surprised grateful hopeful impressed nervous satisfied amused annoyed content curious "
    "disappointed excited thoughtful tired worried calm confident"
).split()

SENTENCES = (
    "The {{ adj }} {{ person }} {{ act }} the {{ thing }} {{ adv }}.",
    "{{ Time }}, the {{ person }} walked from the {{ place }} to the {{ place }} with a {{ adj }} {{ thing }}.",
    "Nobody at the {{ place }} remembered who had {{ act }} the {{ adj }} {{ thing }}.",
    "A {{ thing }} made of {{ material }} stood beside the {{ thing }} in the {{ place }}.",
    "Most books about {{ subject }} also mention {{ subject }} and the {{ adj }} art of {{ subject }}.",
    "The {{ person }} was {{ feel }}, because the {{ thing }} looked {{ adj }} and {{ adj }}.",
    "If the {{ thing }} is too {{ adj }}, ask the {{ person }} at the {{ place }} for a {{ adj }} one.",
    "They spoke about {{ subject }} for an hour and then {{ act }} the {{ thing }}.",
    "Every {{ place }} in the region has its own {{ adj }} way of storing {{ material }}.",
    "It takes practice to learn {{ subject }}, but the {{ person }} teaches it {{ adv }}.",
    "Between the {{ place }} and the {{ place }} there is a {{ adj }} path that few visitors know.",
    "People who enjoy {{ subject }} usually like {{ subject }} as well.",
    "Under the {{ thing }} lay a {{ adj }} piece of {{ material }} and a {{ thing }}.",
    "{{ Time }}, the whole {{ place }} smelled of {{ material }} and fresh paint.",
    "The {{ place }} closed early, so the {{ person }} {{ act }} the {{ thing }} at home.",
    "A good {{ person }} needs patience, a {{ adj }} {{ thing }} and some knowledge of {{ subject }}.",
    "The {{ person }} and the {{ person }} {{ adv }} {{ act }} a {{ thing }} for the {{ place }}.",
    "Some say that {{ subject }} began in a {{ adj }} {{ place }} by the sea.",
    "Whenever it rained, the {{ thing }} in the {{ place }} turned {{ adj }}.",
    "Cheap {{ material }} bends easily, while {{ adj }} {{ material }} lasts for generations.",
    "There was a {{ adj }} smell near the {{ place }}, and the {{ person }} soon found out why.",
    "We read a chapter on {{ subject }} while the {{ person }} {{ act }} the {{ thing }}.",
    "Local newspapers praised the {{ person }} for a {{ adj }} talk about {{ subject }}.",
    "The road past the {{ place }} is {{ adj }}, yet it is the fastest way to the {{ place }}.",
    "Without the {{ thing }}, the {{ person }} could not have {{ act }} the {{ adj }} {{ thing }}.",
    "In her letters, the {{ person }} described the {{ place }} as {{ adj }} and rather {{ adj }}.",
    "The roof of the {{ place }} is covered with {{ material }}, which keeps the {{ thing }} dry.",
    "Children from the {{ place }} {{ act }} a {{ thing }} and gave it to the {{ person }}.",
    "After years of {{ subject }}, the {{ person }} felt {{ feel }} about every {{ adj }} {{ thing }}.",
    "What made the {{ place }} special was its {{ adj }} {{ thing }} of {{ material }}.",
    "She keeps a {{ thing }} for {{ subject }} and another for {{ subject }}.",
    "{{ Time }}, a {{ adj }} {{ thing }} was {{ act }} by the {{ person }}.",
    "The guide explained how {{ material }} was once traded for {{ material }} at the {{ place }}.",
    "Try to keep the {{ thing }} away from the window, or the {{ material }} may fade.",
    "Not far from the {{ place }}, a {{ person }} sells {{ adj }} things made of {{ material }}.",
    "He had never liked {{ subject }}, but the {{ adj }} {{ place }} changed his mind.",
)
ASKS = (
    "Tell me something about {{ subject }}.",
    "What do you know about {{ subject }} and {{ subject }}?",
    "Could you describe a {{ adj }} {{ place }}?",
    "How would a {{ person }} look after a {{ adj }} {{ thing }}?",
    "Please write a few lines about a {{ person }} at the {{ place }}.",
    "I have been reading about {{ subject }}. What else is worth knowing?",
    "Let us talk about {{ subject }} for a while.",
    "Why would anyone keep a {{ thing }} in a {{ place }}?",
    "Go on with the story of the {{ adj }} {{ person }}.",
    "What is a {{ thing }} of {{ material }} good for?",
    "Can you explain how {{ subject }} is taught?",
    "Continue, please, and mention the {{ place }}.",
    "Describe the {{ place }} {{ time }}.",
    "My neighbour is a {{ person }}. What does one do all day?",
    "Give me a short note on {{ material }} and {{ material }}.",
    "And what happened at the {{ place }} afterwards?",
)
OPENERS = (
    "Certainly. Gladly. Of course. Sure. Here is a little more. With pleasure. Let me think. Happy to. Very well. "
    "Good question. Here you go. Naturally. All right."
).split(". ")

ATTRIBUTES = (
    "locker code|badge number|parcel code|ticket number|safe code|door code|order number|membership number|"
    "registration number|account number|case number|gate code|invoice number|library card number|room key code|serial number|"
    "extension number|booking number|voucher code|alarm code|permit number|claim number|customer number|folder number|"
    "shelf number|tag number|patient number|student number|token number|meter reading|post box number|loan number|"
    "warranty number|crate number|queue number|flight code|bike lock code|garage code|phone pin|file number"
).split("|")
NAMES = (
    "Ada Alice Amir Anna Ben Bruno Carla Cedric Clara Daniel Daria David Diego Elena Elias Emma Erik Fatima Felix Fiona "
    "Frank George Grace Greta Hannah Harold Helen Hugo Ingrid Irene Isaac Ivan Jack Jacob Jane Jasper Joan Jonas Julia "
    "Karen Karl Kevin Laura Leo Lena Linda Lucas Lydia Marco Maria Marta Martin Max Mia Miriam Monica Nadia Nathan Nina "
    "Nora Olga Oliver Oscar Otto Paul Paula Pedro Peter Philip Priya Rachel Ralph Ravi Rita Robert Rosa Ruth Samuel Sara "
    "Simon Sofia Stella Steven Tara Thomas Tim Tina Tobias Ursula Vera Victor Viola Walter Wendy William Yusuf Zara Zoe "
    "Agnes Albert Anton Astrid Beatrice Bernard Boris Camilla Caroline Charles Claude Conrad Cyril Doris Dorothy Edgar Edith "
    "Edmund Eleanor Elliot Esther Eugene Evelyn Florence Gilbert Gloria Gustav Harriet Hector Henry Hilda Ignacio Jerome "
    "Josephine Judith Kurt Leonard Lewis Lionel Louise Magnus Marcus Matilda Maurice Mildred Neil Norman Olive Patrick Pearl "
    "Quentin Rafael Raymond Regina Roland Rupert Sylvia Theodore Valerie Vincent Winston Yvonne"
).split()
"""Entities of the facts. None of them occurs in the prose above."""


def split_words(words: tuple[str, ...] | list[str], split: Split) -> list[str]:
    """The words of one split: every third one is held out, the others train; the union is the list."""
    if split == "all":
        return list(words)
    return [word for place, word in enumerate(words) if (place % 3 == 2) == (split == "heldout")]
