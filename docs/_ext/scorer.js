// The scores of Sphinx's search; a result by an entry of the index also names its section, such as
// "Options > learning_rate". Notebooks and pages for developers stand behind guides and reference.
const BEHIND = /^(notebooks|walkthroughs)\/|^(chaos|development|extending|faults|inside|structure)$/;
var Scorer = {
  score: (result) => {
    const [page, title, anchor, , score, , kind] = result;
    if (kind === "index" && anchor) {
      const name = anchor.slice(1).replaceAll("-", page === "options" ? "_" : " ");
      result[1] = `${title} > ${name}`;
    }
    return BEHIND.test(page) ? score / 4 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
