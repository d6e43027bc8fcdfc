// Everything in a document that can be acted on, shadow roots included, with its visible box in CSS pixels, role and
// accessible name, as JSON. Documents of frames are read by themselves.
() => {
  const SELECTOR = 'a[href], area[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], '
    + '[role=link], [role=tab], [role=switch], [role=checkbox], [role=radio], [role=menuitem], [role=menuitemcheckbox], '
    + '[role=menuitemradio], [role=option], [role=treeitem], [role=combobox], [role=textbox], [role=searchbox], '
    + '[role=slider], [role=spinbutton], [contenteditable], [data-key]';
  const INPUT_ROLES = { checkbox: 'checkbox', radio: 'radio', range: 'slider', number: 'spinbutton', search: 'searchbox',
    button: 'button', submit: 'button', reset: 'button', image: 'button', color: 'color', date: 'date' };
  const TAG_ROLES = { a: 'link', area: 'link', button: 'button', textarea: 'textbox', summary: 'button', li: 'listitem',
    img: 'img', option: 'option' };
  const SHOWN_OPTION = 'select[mmrl-picker] option';  // of a list that is open in the page, see popups.py

  const above = element => element.assignedSlot || element.parentElement || element.getRootNode().host || null;
  const within = (element, other) => {
    for (let at = element; at; at = above(at)) if (at === other) return true;
    return false;
  };
  const nearest = (element, selector) => {
    for (let at = element; at; at = above(at)) if (at.matches(selector)) return at;
    return null;
  };
  const topAt = (x, y) => {
    let top = document.elementFromPoint(x, y);
    for (let inner; top && top.shadowRoot; top = inner) {
      inner = top.shadowRoot.elementFromPoint(x, y);
      if (!inner || inner === top) break;
    }
    return top;
  };
  const editable = element => element.isContentEditable && !(above(element) && above(element).isContentEditable);
  const pointed = element => element instanceof HTMLElement && getComputedStyle(element).cursor === 'pointer'
    && !(above(element) && getComputedStyle(above(element)).cursor === 'pointer');
  const isPage = element => element === document.documentElement || element === document.body;

  const role = element => {
    const given = element.getAttribute('role');
    if (given) return given;
    const tag = element.localName;
    if (tag === 'input') return INPUT_ROLES[element.type] || 'textbox';
    if (tag === 'select') return element.multiple || element.size > 1 ? 'listbox' : 'combobox';
    return TAG_ROLES[tag] || (editable(element) ? 'textbox' : 'generic');
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
    const parts = node.localName === 'slot' && node.assignedNodes().length ? node.assignedNodes()
      : (node.shadowRoot || node).childNodes;
    const inner = title ? title.textContent : [...parts].map(contentName).join('');
    return style.display === 'inline' ? inner : ` ${inner} `;
  };
  const byIds = (element, ids) => clean(ids.split(/\s+/).map(id => element.getRootNode().getElementById(id))
    .filter(Boolean).map(contentName).join(' '));
  const name = element => {
    const ids = element.getAttribute('aria-labelledby');
    const label = ids && element.isConnected && byIds(element, ids);
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
    for (let parent = above(element); parent; parent = above(parent)) {
      if (isPage(parent)) break;
      if (getComputedStyle(parent).overflow === 'visible' || parent.localName === 'select') continue;
      const frame = parent.getBoundingClientRect();
      box.x1 = Math.max(box.x1, frame.left); box.y1 = Math.max(box.y1, frame.top);
      box.x2 = Math.min(box.x2, frame.right); box.y2 = Math.min(box.y2, frame.bottom);
    }
    return box;
  };
  const area = box => Math.max(0, box.x2 - box.x1) * Math.max(0, box.y2 - box.y1);

  // A region of an image map has no box: that around its shape, which Chromium counts from the corner of the border.
  const pictureOf = region => {
    const map = region.closest('map');
    return map && [...region.getRootNode().querySelectorAll('img[usemap]')].find(img => img.useMap === `#${map.name}`);
  };
  const regionRect = (region, picture) => {
    const frame = picture.getBoundingClientRect(), { left, top } = frame;
    const numbers = region.coords.split(/[\s,;]+/).map(Number).filter(Number.isFinite);
    let xs = numbers.filter((_, place) => place % 2 === 0), ys = numbers.filter((_, place) => place % 2 === 1);
    if (region.shape.startsWith('circ')) {
      const [x, y, radius] = numbers;
      xs = [x - radius, x + radius]; ys = [y - radius, y + radius];
    } else if (region.shape === 'default') {
      return { left: frame.left, top: frame.top, right: frame.right, bottom: frame.bottom, width: frame.width,
        height: frame.height };
    }
    const [x1, x2, y1, y2] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    return { left: left + x1, top: top + y1, right: left + x2, bottom: top + y2, width: x2 - x1, height: y2 - y1 };
  };
  // Where the middle of the box is outside of the shape, a small box around a point inside of it.
  const regionBox = (region, box) => {
    const inside = (x, y) => topAt(x, y) === region;
    if (inside((box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2)) return box;
    for (let row = 1; row < 16; row += 1) {
      for (let column = 1; column < 16; column += 1) {
        const x = box.x1 + (box.x2 - box.x1) * column / 16, y = box.y1 + (box.y2 - box.y1) * row / 16;
        if (inside(x, y)) return { x1: x - 2, y1: y - 2, x2: x + 2, y2: y + 2 };
      }
    }
    return box;
  };

  const MODAL = (() => {
    const open = [...document.querySelectorAll('dialog[open]')].filter(dialog => dialog.matches(':modal'));
    return open.length ? open[open.length - 1] : null;
  })();
  const inert = element => !!nearest(element, '[inert]') || (MODAL && !within(element, MODAL));

  // Why a click on the middle of a box does not reach an element; an empty text if it does.
  const unreachable = (element, best) => {
    const style = getComputedStyle(element);
    if (element.localName !== 'area'
      && (style.display === 'none' || style.visibility !== 'visible' || Number(style.opacity) < 0.1)) return 'style';
    if (best.x2 - best.x1 < 2 || best.y2 - best.y1 < 2) return 'outside';
    const top = topAt((best.x1 + best.x2) / 2, (best.y1 + best.y2) / 2);
    if (inert(element)) return 'inert';
    if (top && within(top, element)) return '';
    if (style.pointerEvents === 'none') {  // a label around a control still hands the click on
      const label = top && nearest(top, 'label');
      return label && label.control === element ? '' : 'inert';
    }
    return top && within(element, top) ? '' : 'covered';
  };

  // The largest rectangle: the middle of the union of a wrapped link's lines can lie beside all of them.
  const read = element => {
    const picture = element.localName === 'area' ? pictureOf(element) : null;
    const rects = picture ? [regionRect(element, picture)] : [...element.getClientRects()];
    const boxes = rects.map(rect => clip(picture || element, rect));
    let best = boxes.reduce((first, second) => area(second) > area(first) ? second : first,
      { x1: 0, y1: 0, x2: 0, y2: 0 });
    if (picture) best = regionBox(element, best);
    const whole = rects.reduce((sum, rect) => sum + rect.width * rect.height, 0);
    const shown = clean(element.innerText);
    const active = element.getRootNode().activeElement;
    const value = element.isContentEditable ? element.innerText : element.value;
    return {
      key: element.dataset.key || '', tag: element.localName, type: typeof element.type === 'string' ? element.type : '',
      role: role(element), name: name(element), text: shown, box: [best.x1, best.y1, best.x2, best.y2],
      hidden: unreachable(element, best),
      visible_share: whole > 0 ? Math.min(1, boxes.reduce((sum, box) => sum + area(box), 0) / whole) : 0,
      icon_only: !shown && !!element.querySelector('svg, img'),
      disabled: element.matches(':disabled') || element.getAttribute('aria-disabled') === 'true',
      checked: element.checked === undefined ? element.getAttribute('aria-checked') === 'true' : element.checked,
      value: typeof value === 'string' ? value : '',
      data: { ...element.dataset }, row: (nearest(element, '[data-row]') || { dataset: {} }).dataset.row || '',
      focused: active === element || (element.localName === 'select' && element.contains(active)),
      all_selected: !!element.value && element.selectionStart === 0 && element.selectionEnd === element.value.length,
    };
  };

  const found = [];
  const collect = (root, control) => {
    for (const element of root.children) {
      const known = element.matches(SELECTOR) && (!element.matches('[contenteditable]') || editable(element)
        || element.matches(SELECTOR.replace(', [contenteditable]', '')));
      const own = known || (!isPage(element) && typeof element.onclick === 'function') || element.matches(SHOWN_OPTION)
        || (element === document.body && document.designMode === 'on');
      // a pointing hand over what is no control and in none, as pages with listeners have it
      if (own || (!control && element.localName !== 'label' && !isPage(element) && pointed(element)
        && !element.querySelector(SELECTOR))) found.push(element);
      const inside = control || own;
      if (element.shadowRoot) collect(element.shadowRoot, inside);
      collect(element, inside);
    }
  };
  collect(document, false);
  return JSON.stringify(found.map(read));  // the driver copies values eight times slower
}
