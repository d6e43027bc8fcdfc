// Everything on the page that can be acted on, with its visible box in CSS pixels, role and accessible name, as JSON.
() => {
  const SELECTOR = 'a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [role=link], '
    + '[role=tab], [role=switch], [role=checkbox], [role=radio], [role=menuitem], [role=option], [data-key]';
  const INPUT_ROLES = { checkbox: 'checkbox', radio: 'radio', range: 'slider', number: 'spinbutton', search: 'searchbox',
    button: 'button', submit: 'button', reset: 'button', image: 'button', color: 'color', date: 'date' };
  const TAG_ROLES = { a: 'link', button: 'button', textarea: 'textbox', summary: 'button', li: 'listitem', img: 'img' };

  const role = element => {
    const given = element.getAttribute('role');
    if (given) return given;
    const tag = element.localName;
    if (tag === 'input') return INPUT_ROLES[element.type] || 'textbox';
    if (tag === 'select') return element.multiple || element.size > 1 ? 'listbox' : 'combobox';
    return TAG_ROLES[tag] || 'generic';
  };
  const clean = text => (text || '').replace(/\s+/g, ' ').trim();

  // Accessible names of the contents: texts of hidden parts do not count, those of pictures are their descriptions.
  const contentName = node => {
    if (node.nodeType === Node.TEXT_NODE) return node.textContent;
    if (node.nodeType !== Node.ELEMENT_NODE || node.getAttribute('aria-hidden') === 'true') return '';
    const style = getComputedStyle(node);
    if (style.display === 'none' || style.visibility === 'hidden') return '';
    if (['input', 'select', 'textarea'].includes(node.localName)) return '';  // a label around its own control
    if (node.getAttribute('aria-label')) return node.getAttribute('aria-label');
    if (node.localName === 'img') return node.alt;
    const title = node.localName === 'svg' && node.querySelector('title');
    const inner = title ? title.textContent : [...node.childNodes].map(contentName).join('');
    return style.display === 'inline' ? inner : ` ${inner} `;
  };
  const byIds = ids => clean(ids.split(/\s+/).map(id => document.getElementById(id)).filter(Boolean)
    .map(contentName).join(' '));
  const name = element => {
    const label = element.getAttribute('aria-labelledby') && byIds(element.getAttribute('aria-labelledby'));
    if (label) return label;
    if (clean(element.getAttribute('aria-label'))) return clean(element.getAttribute('aria-label'));
    if (element.labels && element.labels.length) return clean([...element.labels].map(contentName).join(' '));
    if (element.localName === 'input' && ['button', 'submit', 'reset'].includes(element.type)) return clean(element.value);
    if (!['input', 'select', 'textarea'].includes(element.localName) && clean(contentName(element))) {
      return clean(contentName(element));
    }
    return clean(element.getAttribute('alt') || element.getAttribute('title') || element.getAttribute('placeholder'));
  };

  // What remains of a rectangle inside the window and inside every ancestor that cuts off its contents.
  const clip = (element, rect) => {
    const box = { x1: Math.max(rect.left, 0), y1: Math.max(rect.top, 0),
      x2: Math.min(rect.right, innerWidth), y2: Math.min(rect.bottom, innerHeight) };
    for (let parent = element.parentElement; parent; parent = parent.parentElement) {
      if (parent === document.documentElement || parent === document.body) break;
      if (getComputedStyle(parent).overflow === 'visible') continue;
      const frame = parent.getBoundingClientRect();
      box.x1 = Math.max(box.x1, frame.left); box.y1 = Math.max(box.y1, frame.top);
      box.x2 = Math.min(box.x2, frame.right); box.y2 = Math.min(box.y2, frame.bottom);
    }
    return box;
  };
  const area = box => Math.max(0, box.x2 - box.x1) * Math.max(0, box.y2 - box.y1);

  // The largest rectangle: the middle of the union of a wrapped link's lines can lie beside all of them.
  const read = element => {
    const rects = [...element.getClientRects()];
    const boxes = rects.map(rect => clip(element, rect));
    const best = boxes.reduce((first, second) => area(second) > area(first) ? second : first,
      { x1: 0, y1: 0, x2: 0, y2: 0 });
    const whole = rects.reduce((sum, rect) => sum + rect.width * rect.height, 0);
    const style = getComputedStyle(element);
    const x = (best.x1 + best.x2) / 2, y = (best.y1 + best.y2) / 2;
    let hidden = '';
    if (style.display === 'none' || style.visibility !== 'visible' || Number(style.opacity) < 0.1) hidden = 'style';
    else if (best.x2 - best.x1 < 2 || best.y2 - best.y1 < 2) hidden = 'outside';
    else {
      const top = document.elementFromPoint(x, y);
      if (!top || !(top === element || element.contains(top) || top.contains(element))) hidden = 'covered';
    }
    const shown = clean(element.innerText);
    return {
      key: element.dataset.key || '', tag: element.localName, type: element.type || '', role: role(element),
      name: name(element), text: shown, box: [best.x1, best.y1, best.x2, best.y2], hidden,
      visible_share: whole > 0 ? Math.min(1, boxes.reduce((sum, box) => sum + area(box), 0) / whole) : 0,
      icon_only: !shown && !!element.querySelector('svg, img'), disabled: !!element.disabled,
      checked: element.checked === undefined ? element.getAttribute('aria-checked') === 'true' : element.checked,
      value: typeof element.value === 'string' ? element.value : '',
      data: { ...element.dataset }, row: (element.closest('[data-row]') || { dataset: {} }).dataset.row || '',
      focused: document.activeElement === element,
      all_selected: !!element.value && element.selectionStart === 0 && element.selectionEnd === element.value.length,
    };
  };
  return JSON.stringify([...document.querySelectorAll(SELECTOR)].map(read));  // the driver copies values eight times slower
}
