// Tooltips: what one points at, or comes to with the arrow keys in a chart that has the focus.
(() => {
  const box = document.getElementById('tooltip');
  let shown = null;
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
  for (const mark of document.querySelectorAll('.spot')) {
    const title = mark.querySelector(':scope > title');  // without a script, the browser shows it
    mark.dataset.tip = title.textContent;
    title.remove();
  }
  const over = (event) => {
    const mark = event.target.closest?.('.spot');
    if (mark) show(mark, event.clientX, event.clientY); else hide();
  };
  document.addEventListener('pointermove', over);
  document.addEventListener('pointerdown', over);
  document.addEventListener('focusout', hide);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') { hide(); return; }
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const chart = document.activeElement?.closest?.('.chart');
    if (!step || !chart) return;
    const marks = [...chart.querySelectorAll('.spot')];
    if (!marks.length) return;
    event.preventDefault();
    const at = marks.indexOf(shown);
    const mark = marks[at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length];
    const place = mark.getBoundingClientRect();
    show(mark, place.left + place.width / 2, Math.max(place.top, 30) + Math.min(place.height, 80) / 2);
  });
  addEventListener('beforeprint', () => {
    for (const each of document.querySelectorAll('details.print')) each.open = true;
  });
})();
