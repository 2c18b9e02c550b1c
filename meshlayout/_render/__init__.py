"""Plain rows in, text, HTML and SVG out; knows nothing of the library's own types."""

from meshlayout._render.notebook import (
    layout_html as layout_html,
    mesh_html as mesh_html,
    mesh_text as mesh_text,
    shards_html as shards_html,
    shards_text as shards_text,
)
from meshlayout._render.pictures import (
    Held as Held,
    Picture as Picture,
    mesh_picture as mesh_picture,
    picture_svg as picture_svg,
    picture_text as picture_text,
    shards_picture as shards_picture,
)
from meshlayout._render.tables import (
    array_text as array_text,
    bytes_text as bytes_text,
    dtype_text as dtype_text,
    html_table as html_table,
    text_table as text_table,
)
