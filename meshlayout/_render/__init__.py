"""Plain rows in, text and HTML out; does not know the types of the library."""

from meshlayout._render.pictures import (
    Held as Held,
    Picture as Picture,
    mesh_picture as mesh_picture,
    picture_html as picture_html,
    picture_text as picture_text,
    shards_picture as shards_picture,
)
from meshlayout._render.tables import (
    array_text as array_text,
    bytes_text as bytes_text,
    dtype_text as dtype_text,
    html_table as html_table,
    ranges_text as ranges_text,
    text_table as text_table,
)
