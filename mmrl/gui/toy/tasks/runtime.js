// What the tasks share: drawing a view of a state, and what disturbs it. Time is counted in actions, never by the clock.
(() => {
  const node = (tag, attributes, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, '');
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter(child => child !== null && child !== undefined));
    return element;
  };
  const button = (key, text, act, attributes) => node('button', { type: 'button', 'data-key': key, onclick: act, ...attributes }, text);
  const input = (key, label, state, name) => node('label', {}, node('span', { class: 'name' }, label),
    node('input', { type: 'text', 'data-key': key, value: state[name], oninput: event => { state[name] = event.target.value; } }));
  const tick = (key, label, checked, act) => node('label', {},
    node('input', { type: 'checkbox', 'data-key': key, checked, onchange: event => act(event.target.checked) }), label);
  const select = (key, label, options, value, act) => node('label', {}, node('span', { class: 'name' }, label),
    node('select', { 'data-key': key, onchange: event => act(event.target.value) },
      options.map(option => node('option', { selected: option === value }, option))));

  window.startTask = (task, config, disturbance) => {
    const state = task.init(config);
    let ticks = 0, loading = 0, loads = 0, popup = null, mirrored = false;
    const kit = {
      node, button, input, tick, select,
      bar: (...children) => node('div', { class: 'bar' }, ...children),
      row: (name, ...children) => node('div', { class: 'row', 'data-row': name }, ...children),
      text: (text, kind) => node('span', { class: kind || 'grow' }, text),
      // Changes the state and draws it anew; `go` also loads another view, which may take some actions.
      set: change => () => { change(); draw(); },
      go: change => () => { change(); loading = disturbance.delays[loads++] || 0; draw(); },
    };
    const draw = () => {
      document.body.className = mirrored ? 'mirrored' : '';
      const parts = loading > 0 ? [node('div', { class: 'loading', 'data-key': 'loading' }, 'Loading ...')]
        : [node('header', {}, config.title), node('main', {}, task.view(state, kit, config))];
      if (popup) {
        const close = () => { popup = null; draw(); };
        parts.push(node('div', { class: 'popup' }, node('div', { style: `left:${popup.x}%;top:${popup.y}%` },
          node('p', {}, popup.text), button('dismiss', popup.button, close))));
      }
      document.body.replaceChildren(...parts);
    };
    const report = () => {
      const goals = task.goals(state, config), wanted = goals.slice(0, -1);
      return { progress: wanted.filter(Boolean).length / wanted.length, success: goals.every(Boolean),
        unharmed: goals[goals.length - 1], done: !!state.submitted, popup: !!popup, loading, mirrored, state };
    };
    draw();
    window.task = {
      report,
      // One action has passed.
      tick: () => {
        ticks += 1;
        const before = JSON.stringify([popup, mirrored, loading]);
        if (loading > 0) loading -= 1;
        if (disturbance.flips.includes(ticks)) mirrored = !mirrored;
        popup = popup || disturbance.popups.find(entry => entry.tick === ticks) || null;
        if (JSON.stringify([popup, mirrored, loading]) !== before) draw();
        return report();
      },
    };
  };
})();
