// Tooltips on hovering, and with the arrow keys in a chart that has focus.
// In the picture of a graph and the table below it, everything that moves with a group is highlighted; a click keeps it.
(() => {
  const box = document.getElementById('tooltip');
  const members = document.querySelectorAll('[data-g], [data-gs]');
  let shown = null, kept = null;
  const pick = (group) => {
    document.body.classList.toggle('picking', group !== null);
    for (const each of members) {
      each.classList.toggle('picked', (each.dataset.g ?? each.dataset.gs).split(' ').includes(group));
    }
  };
  const groupOf = (node) => node.closest?.('[data-g]')?.dataset.g ?? null;
  const hide = () => { shown?.classList.remove('hit'); shown = null; box.hidden = true; };
  const show = (mark, x, y) => {
    if (shown !== mark) { shown?.classList.remove('hit'); shown = mark; mark.classList.add('hit'); }
    if (box.textContent !== mark.dataset.tip) box.textContent = mark.dataset.tip;
    box.hidden = false;
    const right = document.documentElement.clientWidth - box.offsetWidth - 8;
    const above = y - box.offsetHeight - 14;
    box.style.left = `${scrollX + Math.max(8, Math.min(x + 12, right))}px`;
    box.style.top = `${scrollY + (above > 4 ? above : y + 18)}px`;
  };
  for (const title of document.querySelectorAll('.spot > title, .graph g > title')) {
    title.parentNode.dataset.tip = title.textContent;  // without a script, the browser shows the title
    title.remove();
  }
  const over = (event) => {
    const mark = event.target.closest?.('[data-tip]');
    if (mark) show(mark, event.clientX, event.clientY); else hide();
  };
  document.addEventListener('pointermove', over);
  document.addEventListener('pointerdown', over);
  document.addEventListener('focusout', hide);
  if (members.length) {
    document.addEventListener('mouseover', (event) => pick(groupOf(event.target) ?? kept));
    document.addEventListener('click', (event) => {
      if (event.target.closest('summary')) return;
      const group = groupOf(event.target);
      kept = group === kept ? null : group;
      pick(kept);
    });
  }
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') { hide(); kept = null; pick(null); return; }
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const chart = document.activeElement?.closest?.('.chart, .graph');
    if (!step || !chart) return;
    const marks = [...chart.querySelectorAll('.spot, .group')];
    if (!marks.length) return;
    event.preventDefault();
    const at = marks.indexOf(shown);
    const mark = marks[at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length];
    mark.scrollIntoView({ block: 'nearest', behavior: 'instant' });
    const place = mark.getBoundingClientRect();
    show(mark, place.left + place.width / 2, Math.max(place.top, 30) + Math.min(place.height, 80) / 2);
    pick(groupOf(mark) ?? kept);
  });
  addEventListener('beforeprint', () => {
    for (const each of document.querySelectorAll('details.print')) each.open = true;
  });
})();
