"""The classes of Objects365 (Shao et al. 2019), and those among them that are COCO's."""

from vitkit.io.coco_classes import COCO_CLASSES

# fmt: off
OBJECTS365_CLASSES = (
    "Person", "Sneakers", "Chair", "Other Shoes", "Hat", "Car", "Lamp", "Glasses", "Bottle", "Desk", "Cup",
    "Street Lights", "Cabinet/shelf", "Handbag/Satchel", "Bracelet", "Plate", "Picture/Frame", "Helmet", "Book",
    "Gloves", "Storage box", "Boat", "Leather Shoes", "Flower", "Bench", "Potted Plant", "Bowl/Basin", "Flag", "Pillow",
    "Boots", "Vase", "Microphone", "Necklace", "Ring", "SUV", "Wine Glass", "Belt", "Moniter/TV", "Backpack",
    "Umbrella", "Traffic Light", "Speaker", "Watch", "Tie", "Trash bin Can", "Slippers", "Bicycle", "Stool",
    "Barrel/bucket", "Van", "Couch", "Sandals", "Bakset", "Drum", "Pen/Pencil", "Bus", "Wild Bird", "High Heels",
    "Motorcycle", "Guitar", "Carpet", "Cell Phone", "Bread", "Camera", "Canned", "Truck", "Traffic cone", "Cymbal",
    "Lifesaver", "Towel", "Stuffed Toy", "Candle", "Sailboat", "Laptop", "Awning", "Bed", "Faucet", "Tent", "Horse",
    "Mirror", "Power outlet", "Sink", "Apple", "Air Conditioner", "Knife", "Hockey Stick", "Paddle", "Pickup Truck",
    "Fork", "Traffic Sign", "Ballon", "Tripod", "Dog", "Spoon", "Clock", "Pot", "Cow", "Cake", "Dinning Table", "Sheep",
    "Hanger", "Blackboard/Whiteboard", "Napkin", "Other Fish", "Orange/Tangerine", "Toiletry", "Keyboard", "Tomato",
    "Lantern", "Machinery Vehicle", "Fan", "Green Vegetables", "Banana", "Baseball Glove", "Airplane", "Mouse", "Train",
    "Pumpkin", "Soccer", "Skiboard", "Luggage", "Nightstand", "Tea pot", "Telephone", "Trolley", "Head Phone",
    "Sports Car", "Stop Sign", "Dessert", "Scooter", "Stroller", "Crane", "Remote", "Refrigerator", "Oven", "Lemon",
    "Duck", "Baseball Bat", "Surveillance Camera", "Cat", "Jug", "Broccoli", "Piano", "Pizza", "Elephant", "Skateboard",
    "Surfboard", "Gun", "Skating and Skiing shoes", "Gas stove", "Donut", "Bow Tie", "Carrot", "Toilet", "Kite",
    "Strawberry", "Other Balls", "Shovel", "Pepper", "Computer Box", "Toilet Paper", "Cleaning Products", "Chopsticks",
    "Microwave", "Pigeon", "Baseball", "Cutting/chopping Board", "Coffee Table", "Side Table", "Scissors", "Marker",
    "Pie", "Ladder", "Snowboard", "Cookies", "Radiator", "Fire Hydrant", "Basketball", "Zebra", "Grape", "Giraffe",
    "Potato", "Sausage", "Tricycle", "Violin", "Egg", "Fire Extinguisher", "Candy", "Fire Truck", "Billards",
    "Converter", "Bathtub", "Wheelchair", "Golf Club", "Briefcase", "Cucumber", "Cigar/Cigarette", "Paint Brush",
    "Pear", "Heavy Truck", "Hamburger", "Extractor", "Extention Cord", "Tong", "Tennis Racket", "Folder",
    "American Football", "earphone", "Mask", "Kettle", "Tennis", "Ship", "Swing", "Coffee Machine", "Slide", "Carriage",
    "Onion", "Green beans", "Projector", "Frisbee", "Washing Machine/Drying Machine", "Chicken", "Printer",
    "Watermelon", "Saxophone", "Tissue", "Toothbrush", "Ice cream", "Hotair ballon", "Cello", "French Fries", "Scale",
    "Trophy", "Cabbage", "Hot dog", "Blender", "Peach", "Rice", "Wallet/Purse", "Volleyball", "Deer", "Goose", "Tape",
    "Tablet", "Cosmetics", "Trumpet", "Pineapple", "Golf Ball", "Ambulance", "Parking meter", "Mango", "Key", "Hurdle",
    "Fishing Rod", "Medal", "Flute", "Brush", "Penguin", "Megaphone", "Corn", "Lettuce", "Garlic", "Swan", "Helicopter",
    "Green Onion", "Sandwich", "Nuts", "Speed Limit Sign", "Induction Cooker", "Broom", "Trombone", "Plum", "Rickshaw",
    "Goldfish", "Kiwi fruit", "Router/modem", "Poker Card", "Toaster", "Shrimp", "Sushi", "Cheese", "Notepaper",
    "Cherry", "Pliers", "CD", "Pasta", "Hammer", "Cue", "Avocado", "Hamimelon", "Flask", "Mushroon", "Screwdriver",
    "Soap", "Recorder", "Bear", "Eggplant", "Board Eraser", "Coconut", "Tape Measur/ Ruler", "Pig", "Showerhead",
    "Globe", "Chips", "Steak", "Crosswalk Sign", "Stapler", "Campel", "Formula 1", "Pomegranate", "Dishwasher", "Crab",
    "Hoverboard", "Meat ball", "Rice Cooker", "Tuba", "Calculator", "Papaya", "Antelope", "Parrot", "Seal", "Buttefly",
    "Dumbbell", "Donkey", "Lion", "Urinal", "Dolphin", "Electric Drill", "Hair Dryer", "Egg tart", "Jellyfish",
    "Treadmill", "Lighter", "Grapefruit", "Game board", "Mop", "Radish", "Baozi", "Target", "French", "Spring Rolls",
    "Monkey", "Rabbit", "Pencil Case", "Yak", "Red Cabbage", "Binoculars", "Asparagus", "Barbell", "Scallop", "Noddles",
    "Comb", "Dumpling", "Oyster", "Table Teniis paddle", "Cosmetics Brush/Eyeliner Pencil", "Chainsaw", "Eraser",
    "Lobster", "Durian", "Okra", "Lipstick", "Cosmetics Mirror", "Curling", "Table Tennis",
)
# fmt: on
"""Its 365 classes by raw id, which starts at 1, as its annotation files (v2) spell them."""

OTHER_NAMES = {
    "bird": "Wild Bird",
    "handbag": "Handbag/Satchel",
    "suitcase": "Luggage",
    "skis": "Skating and Skiing shoes",
    "sports ball": "Baseball",
    "bowl": "Bowl/Basin",
    "orange": "Orange/Tangerine",
    "dining table": "Dinning Table",
    "tv": "Moniter/TV",
    "teddy bear": "Stuffed Toy",
    "hair drier": "Hair Dryer",
}
"""COCO's name -> the name in Objects365 of the class that D-FINE's weights for it start from, where they differ."""

NUM_ROWS = 366
"""Rows of class heads with one for each raw id, of which there is no 0."""

_ids = {name.lower(): id_ for id_, name in enumerate(OBJECTS365_CLASSES, start=1)}
COCO_ROWS = tuple(_ids[OTHER_NAMES.get(name, name).lower()] for name in COCO_CLASSES)
"""The raw id in Objects365 of each of COCO's 80 classes, in the order of COCO's labels."""
