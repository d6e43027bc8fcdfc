({
  init: config => ({ items: config.items.map(item => ({ ...item })), draft: '', submitted: false }),
  view: (state, kit) => {
    const add = () => {
      if (state.draft.trim()) state.items.push({ id: `n${state.items.length}`, name: state.draft.trim(), done: false });
      state.draft = '';
    };
    return [kit.bar(kit.input('draft', 'New entry', state, 'draft'), kit.button('add', 'Add', kit.set(add))),
      ...state.items.map(item => kit.row(item.name,
        kit.tick(`done-${item.id}`, '', item.done, kit.set(() => { item.done = !item.done; })),
        kit.text(item.name, item.done ? 'grow done' : 'grow'),
        kit.button(`delete-${item.id}`, 'Delete', kit.set(() => { state.items = state.items.filter(o => o !== item); }))))];
  },
  goals: (state, config) => {
    const named = name => state.items.filter(item => item.name === name);
    const met = { add: name => named(name).length === 1, done: name => named(name).some(item => item.done),
      delete: name => named(name).length === 0 };
    const touched = new Set(config.wanted.map(want => want.name));
    const others = config.items.filter(item => !touched.has(item.name));
    const kept = others.every(item => named(item.name).some(now => now.done === item.done));
    const extra = state.items.some(item => !touched.has(item.name) && !others.some(other => other.name === item.name));
    return [...config.wanted.map(want => met[want.kind](want.name)), kept && !extra];
  },
})
