"""A page taken apart, and what must be true of every one."""

import re
from html.parser import HTMLParser

SEEN = "aria-label"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._style = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        self.text += "" if self._style else data

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def assert_self_contained(text):
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in ("script", "iframe", "object", "embed"), tag
        for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    assert "@import" not in text and text.count("url(") == text.count("url(#")
    assert len(page.ids()) == len(set(page.ids()))
    named = {attrs["href"][1:] for _, attrs in page.tags if attrs.get("href", "").startswith("#")}
    assert named <= set(page.ids())


def titles(text):
    return re.findall(r"<h2>(.*?)</h2>", text)


def figures(text):
    return [a[SEEN] for tag, a in Page(text).tags if tag == "svg" and SEEN in a]


def cells(text, title):
    """The texts of the rows of the first table in a section."""
    section = text[text.index(f"<h2>{title}</h2>") :]
    body = section[section.index("<table>") : section.index("</table>")]
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body)
    ]
