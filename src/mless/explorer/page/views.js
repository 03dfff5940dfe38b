// The table of views, in the order of the menu. The names are those of views.py.

import { view as answer } from "./answer.js";
import { view as answers } from "./answers.js";
import { view as between } from "./between.js";
import { causes, chain, ladder } from "./cause.js";
import { view as dose } from "./dose.js";
import { view as forest } from "./forest.js";
import { view as head } from "./head.js";
import { view as likelihood } from "./likelihood.js";
import { view as map } from "./map.js";
import { view as multiverse } from "./multiverse.js";
import { view as placebo } from "./placebo.js";
import { view as start } from "./start.js";
import { view as strip } from "./strip.js";
import { view as tokens } from "./tokens.js";

export const VIEWS = { start, map, head, strip, answers, answer, likelihood, tokens, dose, placebo, multiverse, ladder, causes, chain, forest, between };
