"""Words of the built-in prose, and the split that keeps training text and probes apart.

Every list is cut in two by `split_words`: the indexer of the reference build is trained on `train`, the campaigns ask
in `heldout`. No word here holds a digit, and none is a value word (`values.py`) or an entity name, so no filler
sentence can contain, contradict or overwrite a planted value.
"""

from typing import Literal

Split = Literal["train", "heldout", "all"]

PLACES = (
    "harbour bakery orchard library workshop station market valley museum kitchen garden theatre bridge "
    "farmhouse lighthouse classroom clinic meadow terrace courtyard vineyard warehouse laboratory gallery "
    "allotment boathouse cathedral canteen greenhouse observatory playground quarry ranch stable tavern village "
    "waterfront archive arcade ballroom bookshop campsite cottage dairy embassy ferry foundry gymnasium hillside "
    "inn junction lagoon mill nursery office pavilion quay reservoir sawmill school tearoom watermill yard"
).split()
THINGS = (
    "kettle ladder notebook lantern basket curtain blanket carpet mirror wheelbarrow teapot umbrella suitcase "
    "camera violin telescope compass saddle anchor bicycle bucket candle chimney clock cupboard desk drawer "
    "engine fence fountain guitar hammock hedge helmet jacket jug loom mattress menu newspaper oven painting "
    "parcel piano pillow plate poster pump quilt radio rope sail saucepan scarf shelf shovel sofa spade "
    "staircase stove table tent tray trolley vase wagon wardrobe whistle window"
).split()
PEOPLE = (
    "baker captain carpenter gardener librarian teacher painter farmer nurse plumber tailor cook driver engineer "
    "editor shepherd fisherman florist conductor curator dentist electrician firefighter geologist historian "
    "juggler keeper lawyer mechanic musician neighbour optician pharmacist porter potter printer ranger sailor "
    "sculptor singer surveyor translator traveller volunteer waiter weaver beekeeper architect astronomer "
    "botanist"
).split()
ADJECTIVES = (
    "old quiet narrow bright wooden heavy gentle careful patient cheerful dusty broken famous hidden muddy "
    "painted polished rusty simple sturdy tidy warm weathered yellow round plain modest handsome faded elegant "
    "curious crowded cosy clever borrowed awkward ancient busy calm damp empty fragile generous idle jolly kind "
    "lively mild neat odd pale rare shallow steep tall uneven vivid wide young"
).split()
ACTIONS = (
    "repaired painted carried borrowed cleaned found measured photographed polished replaced sketched sold "
    "tested unpacked washed wrapped admired described examined inspected lifted moved noticed ordered packed "
    "praised sorted studied decorated delivered donated emptied fetched finished followed guarded hid improved "
    "joined labelled mended opened planned rescued restored rebuilt shared stored tidied traded trimmed weighed"
).split()
ADVERBS = (
    "slowly carefully quietly gladly twice again together yesterday eagerly gently patiently proudly quickly "
    "rarely seldom simply steadily suddenly tenderly thoroughly usually willingly almost bravely calmly "
    "cheerfully finally happily neatly often"
).split()
SUBJECTS = (
    "weather baking gardening sailing history music painting cooking travel astronomy carpentry poetry cycling "
    "pottery geology architecture beekeeping photography theatre farming weaving hiking swimming chess botany "
    "printing fishing knitting railways languages furniture cheese bread tea rivers mountains islands gardens "
    "bridges clouds birds insects forests deserts tides harvests festivals markets lighthouses calligraphy"
).split()
MATERIALS = (
    "oak brass linen clay glass wool copper leather marble paper bamboo stone canvas cotton iron silk slate "
    "straw tin velvet willow wax porcelain plaster pine"
).split()
TIMES = (
    "in the morning|after lunch|before dawn|late in the evening|during the winter|in early spring|"
    "on a rainy afternoon|at the end of summer|just before sunset|over the holidays|around noon|"
    "in the middle of autumn|after the storm|on market day|during the long drought|when the fog lifted|"
    "as the bells rang|while the rain fell|once the guests had left|long before the railway came|at low tide|"
    "on the first cold night"
).split("|")
FEELINGS = (
    "delighted puzzled relieved surprised grateful hopeful impressed nervous satisfied amused annoyed content "
    "curious disappointed excited thoughtful tired worried calm confident"
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
    "Nearly every {{ person }} we met {{ adv }} {{ act }} a {{ thing }} or two.",
    "A {{ adj }} {{ thing }} hung over the door of the {{ place }} for many years.",
    "The talk turned to {{ subject }}, which the {{ person }} found {{ adj }}.",
    "Since the {{ place }} has no heating, visitors bring a {{ thing }} of {{ material }}.",
    "{{ Time }}, somebody {{ act }} the {{ thing }} and left it by the {{ place }}.",
    "You can tell a {{ adj }} {{ person }} by the state of the {{ thing }}.",
    "The smallest {{ thing }} in the {{ place }} turned out to be the most {{ adj }}.",
    "Both the {{ place }} and the {{ place }} were built of {{ material }}.",
    "A letter from the {{ person }} mentioned {{ subject }}, a {{ thing }} and little else.",
    "When asked about {{ subject }}, the {{ person }} looked {{ feel }} and pointed at the {{ thing }}.",
    "Old maps show a {{ place }} where the {{ adj }} {{ place }} stands now.",
    "Some {{ material }} was left over, so they {{ act }} a {{ adj }} {{ thing }} with it.",
    "The {{ thing }} and the {{ thing }} were {{ adv }} {{ act }} before the guests came.",
    "I would rather read about {{ subject }} than carry that {{ adj }} {{ thing }} again.",
    "Every spring the {{ person }} {{ act }} the {{ thing }} that winter had spoiled.",
    "It is said that the first {{ person }} of the {{ place }} was fond of {{ subject }}.",
    "A pair of them {{ act }} the {{ thing }} while the {{ person }} watched, {{ feel }} as ever.",
    "No one had {{ act }} the {{ adj }} {{ thing }} since the {{ place }} closed.",
    "Beyond the {{ place }} the road turns {{ adj }}, and carts of {{ material }} go {{ adv }}.",
    "Her favourite corner of the {{ place }} held a {{ thing }} and a {{ adj }} {{ thing }}.",
    "To learn {{ subject }} one needs little more than a {{ thing }} and some {{ material }}.",
    "The {{ person }} from the {{ place }} {{ adv }} speaks of anything but {{ subject }}.",
    "A row of things made of {{ material }} decorated the wall behind the {{ thing }}.",
    "With a {{ thing }} under one arm, the {{ adj }} {{ person }} left the {{ place }}.",
    "They say {{ subject }} is easy, though the {{ person }} at the {{ place }} disagrees.",
    "Last year the {{ place }} was {{ adj }}; this year it looks {{ adj }}.",
    "The lamp above the {{ thing }} was {{ adj }}, so the {{ person }} read {{ adv }}.",
    "There is a small society for {{ subject }} that meets at the {{ place }} {{ time }}.",
    "The older {{ person }} prefers {{ material }}, the younger one likes {{ material }} better.",
    "Near the {{ adj }} {{ place }}, boats loaded with {{ material }} waited for the tide.",
    "He described {{ subject }} as a {{ adj }} pastime for a {{ adj }} {{ person }}.",
    "Once a week the {{ thing }} must be {{ act }}, or it becomes {{ adj }}.",
    "The noise came from the {{ place }}, where a {{ person }} {{ act }} a {{ thing }}.",
    "Long ago a {{ adj }} {{ person }} paid for the {{ place }} with nothing but {{ material }}.",
    "Few things smell as {{ adj }} as fresh {{ material }} in a {{ place }}.",
    "The second {{ person }} {{ act }} what the first one had {{ adv }} hidden in the {{ thing }}.",
    "Please imagine a {{ place }} with a {{ adj }} {{ thing }} in every window.",
    "After the talk on {{ subject }}, everyone felt {{ feel }} and went home {{ adv }}.",
    "A visitor took the {{ thing }} for a {{ thing }}, which made the {{ person }} laugh.",
    "That {{ adj }} {{ place }} is known for {{ subject }} rather than for {{ subject }}.",
    "We found the {{ person }} asleep beside the {{ thing }}, quite {{ feel }}.",
    "Repairs to the {{ place }} took longer than planned, because {{ material }} was scarce.",
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
    "Is {{ subject }} hard to begin with?",
    "Tell me how the {{ person }} spent the day {{ time }}.",
    "What should I look for in a {{ thing }}?",
    "Say more about that {{ adj }} {{ place }}.",
    "I like {{ subject }}. Do you have a story about it?",
    "Who usually works at a {{ place }}?",
    "Which is better for a {{ thing }}, {{ material }} or {{ material }}?",
    "Write a paragraph that begins at a {{ place }}.",
    "How did people learn {{ subject }} in the past?",
    "Interesting. Please go on.",
    "Tell me about a {{ adj }} {{ thing }} and its owner.",
    "What would a {{ person }} say about {{ subject }}?",
    "Carry on, but leave out the {{ thing }}.",
    "Compare a {{ place }} with a {{ place }}.",
)
OPENERS = (
    "Certainly. Gladly. Of course. Sure. Here is a little more. With pleasure. Let me think. Happy to. Very well. "
    "Good question. Here you go. Naturally. All right."
).split(". ")

ATTRIBUTES = (
    "locker code|badge number|parcel code|ticket number|safe code|door code|order number|membership number|"
    "registration number|account number|case number|gate code|invoice number|library card number|room key code|"
    "serial number|extension number|booking number|voucher code|alarm code|permit number|claim number|"
    "customer number|folder number|shelf number|tag number|patient number|student number|token number|"
    "meter reading|post box number|loan number|warranty number|crate number|queue number|flight code|"
    "bike lock code|garage code|phone pin|file number"
).split("|")
NAMES = (
    "Ada Alice Amir Anna Ben Bruno Carla Cedric Clara Daniel Daria David Diego Elena Elias Emma Erik Fatima "
    "Felix Fiona Frank George Grace Greta Hannah Harold Helen Hugo Ingrid Irene Isaac Ivan Jack Jacob Jane "
    "Jasper Joan Jonas Julia Karen Karl Kevin Laura Leo Lena Linda Lucas Lydia Marco Maria Marta Martin Max Mia "
    "Miriam Monica Nadia Nathan Nina Nora Olga Oliver Oscar Otto Paul Paula Pedro Peter Philip Priya Rachel "
    "Ralph Ravi Rita Robert Rosa Ruth Samuel Sara Simon Sofia Stella Steven Tara Thomas Tim Tina Tobias Ursula "
    "Vera Victor Viola Walter Wendy William Yusuf Zara Zoe Agnes Albert Anton Astrid Beatrice Bernard Boris "
    "Camilla Caroline Charles Claude Conrad Cyril Doris Dorothy Edgar Edith Edmund Eleanor Elliot Esther Eugene "
    "Evelyn Florence Gilbert Gloria Gustav Harriet Hector Henry Hilda Ignacio Jerome Josephine Judith Kurt "
    "Leonard Lewis Lionel Louise Magnus Marcus Matilda Maurice Mildred Neil Norman Olive Patrick Pearl Quentin "
    "Rafael Raymond Regina Roland Rupert Sylvia Theodore Valerie Vincent Winston Yvonne"
).split()
"""Entities of the facts. None of them occurs in the prose above."""

WORDS = {
    "place": PLACES,
    "thing": THINGS,
    "person": PEOPLE,
    "adj": ADJECTIVES,
    "act": ACTIONS,
    "adv": ADVERBS,
    "subject": SUBJECTS,
    "material": MATERIALS,
    "time": TIMES,
    "feel": FEELINGS,
}
"""What stands in the slots of the sentences and requests."""


def split_words(words: tuple[str, ...] | list[str], split: Split) -> list[str]:
    """The words of one split: every third one is held out, the others train; the union is the list."""
    if split == "all":
        return list(words)
    return [word for place, word in enumerate(words) if (place % 3 == 2) == (split == "heldout")]
