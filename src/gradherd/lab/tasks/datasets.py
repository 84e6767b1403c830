"""The data sets: the files of every form they come in, and where to download them.

Sizes and checksums are those of decompressed files, so that compression does not matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DataFile:
    """One file of a data set; name.xz and name.gz count as the same file."""

    name: str
    size: int | None = None
    """Bytes when decompressed; None if editions differ."""
    sha256: str | None = None
    """Checksum when decompressed; None if editions differ."""
    aliases: tuple[str, ...] = ()
    """Other names of the same file."""
    text: bool = False
    """Whether lines may also end in CRLF."""


def published(table: str, *, text: bool = False) -> tuple[DataFile, ...]:
    """Return the files of a table: name, bytes and sha256 of each, separated by spaces."""
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(DataFile(name, int(size), sha256, text=text) for name, size, sha256 in rows)


@dataclass(frozen=True)
class Form:
    """A form in which a data set is distributed: its files, and where below a data folder."""

    name: str
    folders: tuple[str, ...]
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class DataSet:
    """A data set: its forms and its public sources."""

    name: str
    title: str
    forms: tuple[Form, ...]
    """The fastest to read comes first."""
    by_hand: str
    """What to put into a data folder by hand, if no download is available or wanted."""
    downloads: tuple[str, ...] = ()
    """Public addresses of the files, or of an archive that has them."""

    def places(self, root: Path) -> Iterator[tuple[Form, Path]]:
        """Yield each form, with each folder below a data folder where it may be."""
        yield from ((form, root / below) for form in self.forms for below in form.folders)


CIFAR_BATCHES = (
    ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
"""CIFAR-10 batches and the checksums of their .bin files; a row is a label and 3,072 pixels."""

CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10, 60,000 colour images of 10 kinds",
    forms=(
        Form(
            "binary",
            ("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10", ""),
            tuple(DataFile(f"{name}.bin", 30_730_000, sha256) for name, sha256 in CIFAR_BATCHES),
        ),
        Form(
            "sheets",
            ("cifar10",),
            (*(DataFile(f"{name}.webp") for name, _ in CIFAR_BATCHES), DataFile("labels.npz")),
        ),
    ),
    by_hand="unpack cifar-10-binary.tar.gz",
    downloads=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)

_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_FASHION_FILES = published("""
train-images-idx3-ubyte 47040016 c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
train-labels-idx1-ubyte 60008 bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
t10k-images-idx3-ubyte 7840016 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
t10k-labels-idx1-ubyte 10008 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
""")
FASHION_MNIST = DataSet(
    name="fashion-mnist",
    title="Fashion-MNIST, 70,000 grey images of 10 kinds of clothes",
    forms=(Form("idx", ("fashion-mnist", "FashionMNIST/raw"), _FASHION_FILES),),
    by_hand="put fashion-mnist/ or FashionMNIST/raw/ with the four *-ubyte.gz files",
    downloads=tuple(f"{_FASHION}/{file.name}.gz" for file in _FASHION_FILES),
)

_WIKITEXT = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
)
# The same text under two names: that of PyTorch's examples, and that of the original release.
_WIKITEXT_FILES = tuple(
    DataFile(f"{part}.txt", size, sha256, aliases=(f"wiki.{part}.tokens",), text=True)
    for part, size, sha256 in (
        ("train", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
        ("valid", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
        ("test", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
    )
)
WIKITEXT2 = DataSet(
    name="wikitext-2",
    title="WikiText-2, two million words of Wikipedia",
    forms=(Form("text", ("wikitext-2",), _WIKITEXT_FILES),),
    by_hand="put wikitext-2/ with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens",
    downloads=tuple(f"{_WIKITEXT}/{file.name}" for file in _WIKITEXT_FILES),
)

_GPT2_BPE_FILES = published(
    """
encoder.json 1042301 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
vocab.bpe 456318 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
""",
    text=True,
)
GPT2_BPE = DataSet(
    name="gpt2-bpe",
    title="the byte-pair vocabulary of GPT-2",
    forms=(Form("text", ("gpt2-bpe",), _GPT2_BPE_FILES),),
    by_hand="put gpt2-bpe/ with encoder.json and vocab.bpe",
    downloads=tuple(
        f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{file.name}"
        for file in _GPT2_BPE_FILES
    ),
)

_M4 = "https://raw.githubusercontent.com/Mcompetitions/M4-methods/master/Dataset"
_M4_FILES = published(
    """
Weekly-train.csv 4015067 d478d3f6ed673e6ed3c2cb0fbed5425f72eedd51318ebebeb0b5ecfcefc37714
Weekly-test.csv 44247 3b2bc4be8e636e802260dcd843ca3c5da40536a1fbe1ecb3229a97dae4f44688
""",
    text=True,
)
M4 = DataSet(
    name="m4",
    title="M4 competition, 359 weekly series",
    forms=(Form("csv", ("m4", "M4"), _M4_FILES),),
    by_hand="put m4/ with Weekly-train.csv and Weekly-test.csv",
    downloads=(f"{_M4}/Train/Weekly-train.csv", f"{_M4}/Test/Weekly-test.csv"),
)

_SST2_FILES = published(
    """
train.tsv 3806081 48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1
dev.tsv 94931 54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0
""",
    text=True,
)
SST2 = DataSet(
    name="sst2",
    title="SST-2 of GLUE, 68,221 phrases of film reviews",
    forms=(Form("tsv", ("sst2", "SST-2"), _SST2_FILES),),
    by_hand="put SST-2/ with train.tsv and dev.tsv",
    downloads=("https://dl.fbaipublicfiles.com/glue/data/SST-2.zip",),
)

# No download: the file is made from the register with a public toolkit. Editions differ, so it has
# no checksum and is validated when it is read.
HMDA_2017 = DataSet(
    name="hmda-2017",
    title="HMDA 2017, mortgage applications of New Jersey",
    forms=(Form("npz", ("hmda-2017",), (DataFile("hmda-2017-NJ.npz"),)),),
    by_hand=(
        "make hmda-2017/hmda-2017-NJ.npz with the toolkit github.com/pasta41/hmda-data-2017 "
        "(X: rows x 18 numbers, y: 1 = granted, 0 = not) and put it"
    ),
)

DATASETS: dict[str, DataSet] = {
    one.name: one for one in (HMDA_2017, WIKITEXT2, GPT2_BPE, M4, CIFAR10, FASHION_MNIST, SST2)
}
"""Data sets by name."""

TASK_DATA: dict[str, tuple[str, ...]] = {
    "digits": (),
    "digits-mlp": (),
    "hmda": ("hmda-2017",),
    "cifar10-lenet": ("cifar10",),
    "fashion-lenet": ("fashion-mnist",),
}
"""Task -> data sets that it needs. Tasks say so themselves, but reading it there imports torch."""
