"""Facts in other scripts: one attribute per language, stated, echoed, asked and begun natively."""

from typing import NamedTuple


class Language(NamedTuple):
    """Sentences with {name} and {value}."""

    code: str
    attribute: str
    names: tuple[str, ...]
    statement: str
    echo: str
    question: str
    prefix: str


LANGUAGES: tuple[Language, ...] = (
    Language(
        "ru",
        "код шкафчика",
        ("Борис", "Галина", "Дмитрий", "Елена", "Зоя", "Кирилл", "Людмила", "Никита", "Ольга", "Тарас"),
        "Код шкафчика для имени {name}: {value}.",
        "Запомню: код шкафчика для имени {name}: {value}.",
        "Какой код шкафчика для имени {name}?",
        "Код шкафчика для имени {name}:",
    ),
    Language(
        "el",
        "κωδικός πόρτας",
        ("Αλέξης", "Βασιλική", "Γιώργος", "Δήμητρα", "Ελένη", "Κώστας", "Μαρία", "Νίκος", "Σοφία", "Χρήστος"),
        "Ο κωδικός πόρτας για το όνομα {name} είναι {value}.",
        "Εντάξει, ο κωδικός πόρτας για το όνομα {name} είναι {value}.",
        "Ποιος είναι ο κωδικός πόρτας για το όνομα {name};",
        "Ο κωδικός πόρτας για το όνομα {name} είναι",
    ),
    Language(
        "zh",
        "储物柜号码",
        ("王芳", "李伟", "张敏", "刘洋", "陈静", "杨磊", "赵雪", "黄强", "周婷", "吴昊"),
        "{name}的储物柜号码是 {value}。",
        "好的,{name}的储物柜号码是 {value}。",
        "{name}的储物柜号码是多少?",
        "{name}的储物柜号码是",
    ),
    Language(
        "ja",
        "会員番号",
        (
            "佐藤さん",
            "鈴木さん",
            "高橋さん",
            "田中さん",
            "伊藤さん",
            "渡辺さん",
            "山本さん",
            "中村さん",
            "小林さん",
            "加藤さん",
        ),
        "{name}の会員番号は {value} です。",
        "わかりました。{name}の会員番号は {value} です。",
        "{name}の会員番号は何番ですか?",
        "{name}の会員番号は",
    ),
    Language(
        "ko",
        "예약 번호",
        ("김민준", "이서연", "박지훈", "최수아", "정하윤", "강도현", "조은서", "윤시우", "장예린", "임준호"),
        "{name} 님의 예약 번호는 {value} 입니다.",
        "네, {name} 님의 예약 번호는 {value} 입니다.",
        "{name} 님의 예약 번호는 무엇인가요?",
        "{name} 님의 예약 번호는",
    ),
    Language(
        "ar",
        "رقم الخزانة",
        ("أحمد", "فاطمة", "خالد", "مريم", "يوسف", "ليلى", "عمر", "سارة", "حسن", "نور"),
        "رقم الخزانة الخاص بـ {name} هو {value}.",
        "حسنا، رقم الخزانة الخاص بـ {name} هو {value}.",
        "ما هو رقم الخزانة الخاص بـ {name}؟",
        "رقم الخزانة الخاص بـ {name} هو",
    ),
    Language(
        "hi",
        "टिकट नंबर",
        ("अमित", "नेहा", "राहुल", "पूजा", "विकास", "अंजलि", "संजय", "कविता", "मोहन", "सीमा"),
        "{name} का टिकट नंबर {value} है।",
        "ठीक है, {name} का टिकट नंबर {value} है।",
        "{name} का टिकट नंबर क्या है?",
        "{name} का टिकट नंबर है",
    ),
    Language(
        "he",
        "מספר הכרטיס",
        ("דוד", "מיכל", "יוסי", "רותם", "אבי", "נועה", "משה", "שירה", "יעל", "אורי"),
        "מספר הכרטיס של {name} הוא {value}.",
        "בסדר, מספר הכרטיס של {name} הוא {value}.",
        "מה מספר הכרטיס של {name}?",
        "מספר הכרטיס של {name} הוא",
    ),
)

LANDMARKS: tuple[tuple[str, str], ...] = (
    ("the Eiffel Tower", "Paris"),
    ("the Colosseum", "Rome"),
    ("the Brandenburg Gate", "Berlin"),
    ("the Parthenon", "Athens"),
    ("Tower Bridge", "London"),
    ("the Sagrada Familia", "Barcelona"),
    ("the Charles Bridge", "Prague"),
    ("the Little Mermaid statue", "Copenhagen"),
    ("the Statue of Liberty", "New York"),
    ("the Golden Gate Bridge", "San Francisco"),
    ("the Hagia Sophia", "Istanbul"),
    ("the Kremlin", "Moscow"),
    ("the Prado", "Madrid"),
    ("the Belem Tower", "Lisbon"),
    ("the Schonbrunn Palace", "Vienna"),
    ("the Space Needle", "Seattle"),
    ("the Christ the Redeemer statue", "Rio de Janeiro"),
    ("the Opera House with the white shells", "Sydney"),
    ("the Tokyo Skytree's older sister, the red tower in Minato", "the capital of Japan"),
    ("the Merlion", "Singapore"),
)
"""A place a person can see from the window, and where that is: the question shares no content word with the fact."""
