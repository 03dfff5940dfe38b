// The table of views, in the order of the menu. The names are those of views.py.

import { view as head } from "./head.js";
import { view as map } from "./map.js";
import { view as start } from "./start.js";
import { view as strip } from "./strip.js";

export const VIEWS = { start, map, head, strip };
