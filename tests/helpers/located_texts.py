"""Small files of images with texts that say what is where."""

import json
import pickle

import cv2
import numpy as np

WIDTH, HEIGHT = 40, 32
CAPTION = "A hot dog and a dog. The dog is red."
REGIONS = [
    dict(bbox=[2, 3, 12, 13], phrase="A hot dog", tokens_positive=[[0, 9]]),
    dict(bbox=[[20, 3, 30, 13], [5, 20, 15, 30]], phrase="a dog", tokens_positive=[[14, 19]]),
    dict(bbox=[20, 3, 30, 13], phrase="The dog", tokens_positive=[[21, 28]]),
]
INSTANCES = [dict(bbox=[1, 2, 11, 12], label=4, category="cat"), dict(bbox=[5, 5, 20, 25], label=1, category="dog")]


def image_line(name="a.jpg", **content):
    return dict(filename=name, height=HEIGHT, width=WIDTH, **content)


def grounding_line(name="a.jpg", caption=CAPTION, regions=REGIONS):
    return image_line(name, grounding=dict(caption=caption, regions=regions))


def detection_line(name="a.jpg", instances=INSTANCES):
    return image_line(name, detection=dict(instances=instances))


def write_images(folder, *names):
    """Write gray images of WIDTH x HEIGHT."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        cv2.imwrite(str(folder / name), np.full((HEIGHT, WIDTH, 3), 90, np.uint8))
    return folder


def write_odvg(path, *lines):
    """Write lines of ODVG; texts are written as they are."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


SENTENCES = [
    "[/EN#1/people Two men] in [/EN#2/clothing red hats] wait .",
    "[/EN#1/people Men] stand at [/EN#3/scene a stop] with [/EN#0/notvisual it] .",
]


def write_flickr30k(folder, name="12"):
    """Write Flickr30k Entities of one image: two men and a hat."""
    for part in ("Annotations", "Sentences"):
        (folder / part).mkdir(parents=True)
    boxes = "".join(
        f"<object><name>{entity}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + 9}</xmax>"
        f"<ymax>{y + 9}</ymax></bndbox></object>"
        for entity, x, y in (("1", 3, 4), ("1", 21, 4), ("2", 5, 2))
    )
    scene = "<object><name>3</name><scene>1</scene><nobndbox>0</nobndbox></object>"
    size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
    text = f"<annotation><filename>{name}.jpg</filename>{size}{boxes}{scene}</annotation>"
    (folder / "Annotations" / f"{name}.xml").write_text(text)
    (folder / "Sentences" / f"{name}.txt").write_text("\n".join(SENTENCES))
    (folder / "val.txt").write_text(f"{name}\n")
    return folder


def write_refcoco(folder):
    """Write RefCOCO's pickle of two references, one of them in testA, and instances.json."""
    folder.mkdir(exist_ok=True, parents=True)
    boxes = {7: [2, 3, 10, 10], 8: [20, 5, 12, 20]}
    content = dict(
        images=[dict(id=5, file_name="a.jpg", width=WIDTH, height=HEIGHT)],
        annotations=[dict(id=k, image_id=5, category_id=1, bbox=box) for k, box in boxes.items()],
        categories=[dict(id=1, name="person")],
    )
    (folder / "instances.json").write_text(json.dumps(content))
    texts = {7: ("val", ["left man", "Mr. Left"]), 8: ("testA", ["man right?"])}
    refs = [
        dict(ref_id=k, ann_id=k, image_id=5, split=split, category_id=1, sentences=[dict(raw=raw) for raw in raws])
        for k, (split, raws) in texts.items()
    ]
    path = folder / "refs(unc).p"
    path.write_bytes(pickle.dumps(refs, protocol=2))
    return path


def write_mdetr(path):
    """Write MDETR's JSON of one caption, and an expression of another image without tokens_positive."""
    content = dict(
        images=[
            dict(id=1, file_name="a.jpg", width=WIDTH, height=HEIGHT, caption=CAPTION),
            dict(id=2, file_name="b.jpg", width=WIDTH, height=HEIGHT, caption="left man"),
        ],
        annotations=[
            dict(id=1, image_id=1, category_id=1, bbox=[2, 3, 10, 10], tokens_positive=[[0, 9]]),
            dict(id=2, image_id=1, category_id=1, bbox=[20, 3, 10, 10], tokens_positive=[[14, 19]]),
            dict(id=3, image_id=1, category_id=1, bbox=[5, 20, 10, 10], tokens_positive=[[14, 19]]),
            dict(id=4, image_id=2, category_id=1, bbox=[2, 3, 10, 10]),
        ],
        categories=[dict(id=1, name="object")],
    )
    path.write_text(json.dumps(content))
    return path
