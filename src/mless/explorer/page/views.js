// The table of views, in the order of the menu. The names are those of views.py.

import { view as start } from "./start.js";

export const VIEWS = { start };
